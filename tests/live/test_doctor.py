from __future__ import annotations

import json
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows import watcher
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest, WatchRequest


@pytest.fixture
def attending(tmp_path):
    """A watch of what is inside; gives the reports, the sentences and the watcher."""
    seen = SimpleNamespace(told=[], said=[])
    request = WatchRequest(health=str(tmp_path), script="train.py")
    seen.watcher = watcher.TrainingWatcher(request, seen.told.append, seen.said.append)

    @contextmanager
    def inside():
        with seen.watcher.attending():
            yield seen
        seen.watcher.ended(None)

    return inside


@pytest.fixture
def attended(attending):
    """What a loop is told that is given to it, as (verdict, step); and the watcher."""

    def attend(loop):
        with attending() as seen:
            loop()
        assert seen.said == []
        return [(report.verdict, report.run["step"]) for report in seen.told], seen.watcher

    return attend


@pytest.mark.parametrize("fused", [False, True])
def test_one_look_sees_how_far_a_scaler_settles(fused, attending, monkeypatch):
    """What its scaler has sent to a fused optimizer is away while it looks: torch would multiply the scales."""
    seen, sent = [], []
    look = watcher.look

    def spied(program, **options):
        with watcher.at_its_begin(program):
            sent.append("grad_scale" in vars(program.optimizer))
        sent.append("grad_scale" in vars(program.optimizer))
        seen.append(look(program, **options))
        return seen[-1]

    monkeypatch.setattr(watcher, "look", spied)
    with attending() as watch:
        scale, skipped = trained(fused)
    assert (watch.told, watch.said) == ([], [])
    assert sent == [False, fused]
    assert [one.backoffs for one in seen] == [skipped]
    assert (scale, skipped) == (2.0**20 / 2.0**skipped, skipped)
    assert skipped > 4


def trained(fused):
    """A few steps over the same batch, from a scale that is too high: the last one, and how many were skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    batch, skipped = torch.randn(4, 8), 0
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().pow(2).mean() * 100
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return scaler.get_scale(), skipped


@pytest.mark.parametrize("model", [None, nn.Linear(4, 2)])
def test_a_bundle_that_holds_nothing_is_not_kept(model, attending, tmp_path):
    weight = torch.ones(4, requires_grad=True) if model is None else None
    optimizer = torch.optim.SGD([weight] if model is None else model.parameters(), lr=0.1)
    with attending() as seen:
        batch = torch.full((4,), torch.nan)
        (batch * weight if model is None else model(batch)).sum().backward()
        optimizer.step()
    assert (tmp_path / "bundle-0").exists() == ("bundle" in seen.told[0].run["kept"]) == (model is not None)
    assert any("bisect-nan" in sentence for sentence in seen.said) is False


@pytest.mark.parametrize("sick", [False, True])
def test_a_scaler_that_skips_masters_may_settle(sick, attending):
    """Where it would let them step cannot be asked; a loss that is not finite is looked at."""
    model = nn.Linear(4, 2).half()
    master_weights = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer, scaler = torch.optim.SGD(master_weights, lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with attending() as seen:
        for step in range(10):
            model.zero_grad()
            batch = torch.full((4,), torch.nan if sick and step == 9 else 1.0).half()
            scaler.scale(model(batch).float().square().sum()).backward()
            for master, parameter in zip(master_weights, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            scaler.step(optimizer)
            scaler.update()
    assert seen.said == ["step 0 was skipped by its scaler, and could not be run again: that may be health"]
    assert [finding.code for report in seen.told for finding in report.findings] == (["AMP204"] if sick else [])


@pytest.mark.parametrize("several", [False, True])
def test_of_several_optimizers_it_is_said_whose_step_was_sick(several, attending, check_report):
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 1)
    opt_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=0.1)
    with attending() as seen:
        for step in range(2):
            if several:
                critic(torch.ones(4)).sum().backward()
                opt_critic.step()
            (actor(torch.ones(4)) / (1 - step)).sum().backward()
            opt_actor.step()
    (report,) = (*seen.told, *seen.said)
    said = "opt_actor (Adam, optimizer2 in the log)" if several else None
    assert check_report(render_json(report))["run"].get("optimizer") == said


def by_hand(model, _):
    for parameter in model.parameters():
        parameter.grad = None


CLEARS = {
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "by hand": by_hand,
    "by hand with zeros": lambda model, _: [parameter.grad.zero_() for parameter in model.parameters()],
}


@pytest.mark.parametrize(("clipped", "scaled"), [(False, False), (True, True)])
@pytest.mark.parametrize("clear", CLEARS)
def test_gradients_that_the_loop_has_thrown_away_are_no_step_s(clear, clipped, scaled, attended):
    """A loop that leaves a sick batch out by itself trains on, and its next step is healthy."""

    def loop():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        for step in range(4):
            x = torch.full((2, 4), float("nan") if step == 1 else 1.0)
            loss = model(x).pow(2).mean()
            scaler.scale(loss).backward()
            if clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if loss.isfinite():
                scaler.step(optimizer)
            else:
                CLEARS[clear](model, optimizer)
            if clipped or loss.isfinite():
                scaler.update()
            optimizer.zero_grad(set_to_none=clear in ("zero_grad", "by hand"))

    told, watching = attended(loop)
    assert told == []
    assert watching._lines.attempted == 3


def gan(thrown_away, sick):
    """A turn in which the loop throws one model's gradients away, and one model's loss is NaN."""

    def loop():
        torch.manual_seed(0)
        models = {"critic": nn.Linear(4, 1), "generator": nn.Linear(4, 4)}
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        for turn in range(3):
            for name, model in models.items():
                noise = torch.randn(2, 4) * (float("nan") if (turn, name) == (1, sick) else 1.0)
                made = models["generator"](noise)
                models["critic"](made.detach() if name == "critic" else made).pow(2).mean().backward(
                    inputs=list(model.parameters())
                )
            for name, optimizer in optimizers.items():
                if turn == 1 and name == thrown_away:
                    optimizer.zero_grad()
            for name, optimizer in reversed(optimizers.items()):
                if turn != 1 or name != thrown_away:
                    optimizer.step()
                optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(("sick", "verdicts"), [("critic", []), ("generator", ["sick"])])
def test_what_was_thrown_away_of_one_model_is_no_alarm_at_another_s_step_and_hides_none(sick, verdicts, attended):
    told, _ = attended(gan("critic", sick))
    assert [verdict for verdict, _ in told] == verdicts


def test_a_scale_with_which_one_step_is_well_is_no_verified_setting(attended):
    """Where the scaler goes from there, its own settings decide, and no step after this one was replayed."""

    def loop():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=0.999)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().pow(2).mean() * 100
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    _, watching = attended(loop)
    (finding,) = watching.report.findings
    assert finding.prescription.kind == "init_scale"
    assert finding.prescription.status == "not_run"
    assert "this step, which is finite with it" in finding.prescription.reason


def test_a_training_that_takes_no_step_is_sick_though_the_look_at_its_first_settled_nothing(attending):
    with attending() as seen:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=0.99)
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [report.verdict for report in seen.told] == ["inconclusive", "sick"]
    report = seen.watcher.report
    assert report.verdict == "sick"
    assert [(one.code, one.severity) for one in report.findings] == [("AMP740", "error"), ("AMP405", "warning")]


def by_nan(model):
    model.weight.grad.add_(float("nan"))


def by_factor(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 1e30 * 1e30


def by_own_clipping(model):
    total = torch.zeros(())
    model.weight.grad.mul_(1.0 / total).mul_(0.0)


@pytest.mark.parametrize("edit", [by_nan, by_factor, by_own_clipping])
def test_gradients_that_the_loop_has_changed_are_no_fault_of_the_hardware(edit, attended, tmp_path):
    def loop():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(8, 4)).pow(2).mean().backward()
            if step == 2:
                edit(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    told, watching = attended(loop)
    assert told == [("not_reproduced", 2)]
    (error,) = watching.report.errors
    assert "step 2 was not finite" in error.message
    assert "gradients of weight" in error.message
    assert "changed between the backward and the step, by the loop's own code or a hook" in error.message
    assert "hardware" not in error.message
    replayed = bisect_nan(ReplayRequest(factory=str(tmp_path / "bundle-2"), device="cpu"))
    assert (replayed.verdict, replayed.errors[0].message) == ("not_reproduced", error.message)


def with_lr(model, optimizer):
    optimizer.param_groups[0]["lr"] = float("inf")


def with_no_eps(model, optimizer):
    """A unit that no batch reaches: its gradient is 0, and so is the mean of its squares."""
    optimizer.param_groups[0]["eps"] = 0.0
    optimizer.state[model[0].bias]["exp_avg_sq"].zero_()
    with torch.no_grad():
        model[0].bias.fill_(-1e4)


def by_writing(model, optimizer):
    """What the loop does to the weights once they are updated."""
    optimizer.register_step_post_hook(lambda *_: model[0].bias.data.fill_(float("nan")))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (with_lr, "made the weights so: lr is inf"),
        (with_no_eps, "its exp_avg_sq is 0 in 4 places where the weights are lost, and eps is 0"),
        (by_writing, "made the weights so, or what the loop did to the weights after it"),
    ],
)
def test_an_update_that_makes_the_weights_non_finite_is_named(fault, reason, attended, check_report):
    def loop():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            if step == 1:
                fault(model, optimizer)
                if fault is with_no_eps:
                    model[0].bias.grad.zero_()
                    optimizer.state[model[0].bias]["exp_avg"].zero_()
            optimizer.step()
            if step == 1:
                optimizer.param_groups[0]["lr"] = 0.1

    told, watching = attended(loop)
    assert told == [("sick", 2)]
    check_report(render_json(watching.report))
    (finding,) = [one for one in watching.report.findings if one.where.tensor == "0.bias"]
    assert (finding.where.step, finding.where.phase, finding.where.op) == (1, "optimizer", "Adam.step")
    assert "after step 1: the gradients of that step were finite, and its update (Adam, lr=" in finding.message
    assert finding.message.endswith(reason)
    if fault is with_no_eps:
        assert finding.prescription.detail == "give the optimizer eps=1e-8"


def test_an_eps_that_is_zero_in_fp16_is_the_change_and_not_a_checkpoint(attended):
    def loop():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(64, 5)).half()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(torch.randint(40, (8, 4))).float(), torch.randint(5, (8,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    _, watching = attended(loop)
    lost = [one for one in watching.report.findings if "eps=1e-08 is 0 in float16" in one.message]
    assert lost
    for finding in lost:
        cure = finding.prescription
        assert (cure.kind, cure.value, cure.status) == ("optimizer", {"eps": 1e-4}, "not_run")
        assert cure.detail == "give the optimizer eps=1e-4 (or fp32 parameters)"
    assert [one.status for one in lost[0].prescription.alternatives] == ["failed"], (
        "the repaired state, as it was tried"
    )


def test_a_penalty_on_gradients_is_replayed_from_its_bundle_as_in_place(attended, tmp_path):
    def loop():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(8, 4, requires_grad=True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            slope = slope - slope if step == 1 else slope
            (out.pow(2).mean() + (slope.pow(2).sum(1).sqrt() - 1).pow(2).mean()).backward()
            optimizer.step()

    told, watching = attended(loop)
    assert told == [("sick", 1)]
    replayed = bisect_nan(ReplayRequest(factory=str(tmp_path / "bundle-1"), device="cpu", compare_steps=0))
    assert [one.message for one in replayed.findings] == [one.message for one in watching.report.findings]
    assert replayed.findings[0].where.op == "aten.sqrt"


def test_of_an_optimizer_that_calls_its_closure_itself_the_last_backward_is_run_again(attended, tmp_path):
    calls = []

    def loop():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        batch = torch.randn(8, 4)

        def closure():
            optimizer.zero_grad()
            loss = (model(batch).abs() * (len(calls) < 8)).log().mean()
            loss.backward()
            calls.append(model.weight.grad.isfinite().all())
            return loss

        for _ in range(4):
            optimizer.step(closure)

    told, watching = attended(loop)
    assert calls[0]
    assert not calls[8]
    ((verdict, step),) = told
    assert (verdict, step) == ("sick", watching.report.run["step"])
    (finding,) = watching.report.findings
    assert (finding.where.phase, finding.where.op) == ("loss", "aten.log")
    assert "calls the loop's closure itself" in watching.report.skipped[0].reason
    replayed = bisect_nan(ReplayRequest(factory=str(tmp_path / f"bundle-{step}"), device="cpu", compare_steps=0))
    assert [one.message for one in replayed.findings] == [finding.message]


def test_clocks_that_the_script_puts_in_place_of_python_s_harm_no_watch(attending, tmp_path, monkeypatch):
    """Tests freeze time, and a mock returns a mock."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attending() as seen:
        for name in ("time", "time_ns", "monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: "noon")
        for _ in range(3):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        seen.watcher.ended(None)  # while the log is open
    monkeypatch.undo()
    assert (seen.told, seen.said) == ([], [])
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert (kinds.count("step"), kinds[-1]) == (3, "end")


@pytest.mark.parametrize(
    ("dtype", "scaler", "said"),
    [("fp16", None, True), ("fp16", False, True), ("fp16", True, False), ("bf16", None, False)],
)
def test_the_last_line_says_where_fp16_had_no_scaler(dtype, scaler, said, tmp_path):
    """`scaler` is whether it is enabled; None: there is none."""
    seen = watcher.TrainingWatcher(WatchRequest(health=str(tmp_path), script="train.py"), print, print)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.amp.GradScaler("cpu", enabled=bool(scaler), init_scale=8.0)
    with seen.attending():
        for _ in range(3):
            with torch.autocast("cpu", dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]):
                loss = model(torch.ones(2, 4)).float().square().mean()
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                own.scale(loss).backward()
                own.step(optimizer)
                own.update()
        seen.ended(None)
    assert ("; fp16 without a GradScaler: lost gradients are found by" in seen.summary()) is said
