from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from ampdoctor.errors import CheckpointError
from ampdoctor.replay.load_checkpoint import read_scaler_state, resume
from ampdoctor.replay.training_run import TrainingRun

SETTLED = {"scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 830}


@dataclass
class State:
    model: dict | None = None
    optimizers: dict = field(default_factory=dict)
    scaler: dict | None = None
    global_step: int | None = None


class Net(nn.Module):
    def __init__(self, width=3, *, tie=False):
        super().__init__()
        self.enc = nn.Linear(2, width)
        self.bn = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 2)
        self.again = nn.Linear(width, 2)
        if tie:
            self.again.weight = self.out.weight

    def forward(self, x):
        return self.out(self.bn(self.enc(x))) + self.again(self.enc(x))


def make_run(model=None, **changes):
    return TrainingRun(
        model=Net() if model is None else model, batches=[torch.ones(2, 2)], loss=lambda m, b: m(b).sum(), **changes
    )


def weights(seed=1, **changes):
    torch.manual_seed(seed)
    model = Net(**changes)
    model.bn.running_mean.fill_(5.0)
    return {key: value.clone() for key, value in model.state_dict().items()}


def trained(model, make=torch.optim.AdamW, steps=2, **arguments):
    optimizer = make(model.parameters(), lr=0.01, **arguments)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    return optimizer


def assert_same(model, state):
    own = model.state_dict()
    assert set(own) == set(state)
    assert all(torch.equal(own[key], state[key]) for key in own)


@pytest.mark.parametrize(
    ("prefix", "wrap"),
    [("module._orig_mod.", lambda m: m), ("", nn.DataParallel), ("", lambda m: torch.compile(m, backend="eager"))],
)
def test_weights_and_buffers_are_loaded_whatever_wraps_them(prefix, wrap):
    state, model = weights(), Net()
    report = resume(make_run(wrap(model)), {}, None, State({prefix + k: v for k, v in state.items()}, global_step=7))
    assert_same(model, state)
    assert report.loaded == ("weights",)
    assert report.tensors == len(state)
    assert report.global_step == 7
    assert report.lacks == ()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda s: [s.pop(k) for k in list(s) if k.startswith("out")],
            r"2 of 11 tensors of the model are missing \(out.weight, out.bias\); --allow-partial",
        ),
        (lambda s: s.update(extra=torch.ones(1)), r"1 key of the file is unknown to the model \(extra\)"),
        (
            lambda s: s.update({"out.weight": torch.ones(2, 9)}),
            r"1 shape is different \(out.weight: \(2, 9\) in the file, \(2, 3\) in the model\)",
        ),
        (lambda s: [s.update({f"model.{k}": s.pop(k)}) for k in list(s)], "they fit without 'model.'"),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_nothing_is_loaded(change, sentence):
    state, model = weights(), Net()
    change(state)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    file = State(state, {"optimizer": trained(Net()).state_dict()}, dict(SETTLED))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        resume(make_run(model, scaler={"init_scale": 8.0}), {"optimizer": optimizer}, scaler, file)
    assert "\n" not in str(caught.value)
    assert_same(model, before)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scaler.get_scale() == 8.0


def test_partial_loading_loads_what_fits_and_reports_the_rest():
    state, model = weights(), Net()
    state.pop("enc.bias")
    state["extra"] = torch.ones(1)
    state["out.weight"] = torch.ones(2, 9)
    kept = model.out.weight.clone()
    report = resume(make_run(model), {}, None, State(state), allow_partial=True)
    assert report.missing == ("enc.bias",)
    assert report.unexpected == ("extra",)
    assert report.mismatched == ("out.weight",)
    assert torch.equal(model.enc.weight, state["enc.weight"])
    assert torch.equal(model.out.weight, kept)


def test_a_tied_tensor_needs_to_be_there_once():
    state, model = weights(tie=True), Net(tie=True)
    state.pop("again.weight")
    report = resume(make_run(model), {}, None, State(state))
    assert report.missing == ()
    assert torch.equal(model.again.weight, state["out.weight"])
    assert model.again.weight is model.out.weight


def test_the_models_own_renaming_of_older_keys_is_honoured():
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.new = nn.Linear(2, 2)
            self.register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(module, state, prefix, *rest):
            for part in ("weight", "bias"):
                if f"{prefix}old.{part}" in state:
                    state[f"{prefix}new.{part}"] = state.pop(f"{prefix}old.{part}")

    model = nn.Sequential(Renamed())
    old = {"0.old.weight": torch.full((2, 2), 3.0), "0.old.bias": torch.zeros(2)}
    resume(make_run(model), {}, None, State(old))
    assert torch.equal(model[0].new.weight, old["0.old.weight"])
    with pytest.raises(CheckpointError, match=r"1 of 2 tensors of the model are missing \(0.new.bias\)"):
        resume(make_run(model), {}, None, State({"0.old.weight": torch.ones(2, 2)}))


def test_casts_are_noted_above_all_those_that_make_infinities():
    state = weights()
    state["enc.weight"][0, 0] = 1e5
    report = resume(make_run(Net().half()), {}, None, State(state))
    assert any("float32 in the file and float16 in the model" in note for note in report.notes)
    assert any("1 tensor is beyond the range" in note and "enc.weight" in note for note in report.notes)
    model = Net()
    report = resume(make_run(model), {}, None, State({k: v.half() for k, v in weights().items()}))
    assert model.enc.weight.dtype is torch.float32
    assert not any("beyond" in note for note in report.notes)
    assert any("float16 in the file" in note for note in report.notes)


def test_optimizer_state_is_loaded_and_the_file_is_not_trained():
    source = Net()
    saved = trained(source).state_dict()
    kept = saved["state"][0]["exp_avg"].clone()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    report = resume(make_run(model), {"optimizer": optimizer}, None, State(weights(), {"optimizer": saved}))
    assert report.loaded == ("weights", "optimizer")
    assert torch.equal(optimizer.state[model.enc.weight]["exp_avg"], kept)
    assert "learning rate 0.01 of the checkpoint replaces the run's 0.5" in report.notes
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(saved["state"][0]["exp_avg"], kept)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "it has 2 parameter groups, the run's has 1"),
        (lambda s: s["param_groups"][0]["params"].pop(), "its group 0 has 7 parameters, the run's has 8"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.ones(5)),
            r"exp_avg of enc.weight has shape \(5,\), the parameter \(3, 2\)",
        ),
        (lambda s: s.pop("state"), "it has no param_groups and state"),
        (
            lambda s: s.update(trained(Net(), torch.optim.SGD, momentum=0.9).state_dict()),
            r"another kind \(it has dampening, momentum, nesterov, not betas\)",
        ),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_one_sentence(change, sentence):
    saved, model = trained(Net()).state_dict(), Net()
    change(saved)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    file = State(weights(), {"optimizer": saved})
    with pytest.raises(CheckpointError, match=sentence):
        resume(make_run(model), {"optimizer": optimizer}, None, file)
    assert_same(model, before)
    report = resume(make_run(model), {"optimizer": optimizer}, None, file, allow_partial=True)
    assert report.loaded == ("weights",)
    assert any(note.startswith("left out: ") for note in report.notes)


def test_several_optimizers_are_paired_by_name_and_else_in_order():
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 3)})
    states = {
        name: torch.optim.SGD(model[name].parameters(), lr=lr, momentum=0.9).state_dict()
        for name, lr in (("d", 0.1), ("g", 0.2))
    }

    def optimizers():
        return {name: torch.optim.SGD(model[name].parameters(), lr=1.0, momentum=0.9) for name in ("g", "d")}

    for keys in ({"d": "d", "g": "g"}, {"d": "optimizers.d", "g": "optimizers.g"}):
        built = optimizers()
        resume(make_run(model), built, None, State(model.state_dict(), {keys[name]: states[name] for name in states}))
        assert [built[name].param_groups[0]["lr"] for name in ("g", "d")] == [0.2, 0.1]
    built = optimizers()
    in_order = {"optimizer_states.0": states["g"], "optimizer_states.1": states["d"]}
    resume(make_run(model), built, None, State(model.state_dict(), in_order))
    assert [built[name].param_groups[0]["lr"] for name in ("g", "d")] == [0.2, 0.1]
    with pytest.raises(CheckpointError, match=r"2 optimizers \(g, d\) and the checkpoint has the state of 1"):
        resume(make_run(model), optimizers(), None, State(model.state_dict(), {"optimizer": states["g"]}))
    with pytest.raises(CheckpointError, match="agree only in part"):
        resume(make_run(model), optimizers(), None, State(model.state_dict(), {"g": states["g"], "x": states["d"]}))


def test_a_scaler_given_as_arguments_gets_the_files_state():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    report = resume(make_run(scaler={"init_scale": 8.0}), {}, scaler, State(weights(), scaler=dict(SETTLED)))
    assert scaler.state_dict() == SETTLED
    assert "scaler" in report.loaded
    assert report.scaler_continued
    assert report.lost_scaler is None


@pytest.mark.parametrize("given", ["object", "callable"])
@pytest.mark.parametrize(("scale", "continued"), [(65536.0, False), (32.0, True)])
def test_a_scaler_of_the_users_own_is_kept_and_compared(given, scale, continued):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    run = make_run(scaler=scaler if given == "object" else lambda: scaler)
    report = resume(run, {}, scaler, State(weights(), scaler=dict(SETTLED)))
    assert scaler.get_scale() == scale
    assert report.scaler_continued is continued
    assert (report.lost_scaler is None) is continued
    assert (report.file_scaler.scale, report.file_scaler.growth_tracker) == (32.0, 830)


def test_a_run_without_a_scaler_does_not_continue_the_files():
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for scaler in (None, disabled):
        report = resume(make_run(), {}, scaler, State(weights(), scaler=dict(SETTLED)))
        assert not report.scaler_continued
    assert resume(make_run(), {}, disabled, State(weights())).scaler_continued
    # needs none; has one, which another precision disables
    for run in (make_run(precision="bf16"), make_run(scaler={})):
        assert resume(run, {}, disabled, State(weights(), scaler=dict(SETTLED))).scaler_continued


@pytest.mark.parametrize(
    ("change", "dead", "lost"),
    [
        *(({"scale": scale}, True, False) for scale in (math.inf, math.nan, 0.0, 2.0**-128)),
        ({"scale": 2.0**-127}, False, True),
        ({"_growth_tracker": 0}, False, False),
    ],
)
def test_a_scale_that_is_dead_or_has_not_settled_is_none_to_go_on_with(change, dead, lost):
    scaler = torch.amp.GradScaler("cpu")
    report = resume(make_run(scaler=lambda: scaler), {}, scaler, State(weights(), scaler=SETTLED | change))
    assert not report.scaler_continued
    assert ((report.lost_scaler is not None), report.file_scaler.dead) == (lost, dead)


def test_reading_a_scaler_state():
    assert read_scaler_state(None) is None
    assert read_scaler_state({}) is None
    assert read_scaler_state(SETTLED | {"scale": torch.tensor(2.0)}).scale == 2.0
    assert read_scaler_state({"loss_scale": 8.0, "unskipped": 3}).growth_tracker == 3
    with pytest.raises(CheckpointError, match="has no growth_factor"):
        read_scaler_state({key: value for key, value in SETTLED.items() if key != "growth_factor"})
    for odd in ("big", None, torch.ones(2), True):
        with pytest.raises(CheckpointError, match=r"holds something else than a number as scale$"):
            read_scaler_state(SETTLED | {"scale": odd})


def test_a_scaler_state_that_cannot_be_read_is_not_wanted_with_a_fresh_one():
    file = State(weights(), scaler=SETTLED | {"scale": "big"})
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(CheckpointError, match="as scale; bisect-nan --fresh-scaler goes on without it"):
        resume(make_run(scaler={}), {}, scaler, file)
    report = resume(make_run(scaler={}), {}, scaler, file, fresh_scaler=True)
    said = "the checkpoint's scaler state holds something else than a number as scale, and is not loaded"
    assert (report.notes, report.lacks) == ((f"{said} (--fresh-scaler)",), ())


def test_an_apex_state_sets_the_scale_and_leaves_the_runs_other_settings():
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)
    apex = {"loss_scale": 4096.0, "unskipped": 17}
    report = resume(make_run(scaler={"growth_interval": 100}), {}, scaler, State(weights(), scaler=apex))
    assert scaler.state_dict() == SETTLED | {"scale": 4096.0, "growth_interval": 100, "_growth_tracker": 17}
    assert report.scaler_continued


def test_a_load_hook_does_it_all_with_the_built_parts():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    seen = {}

    def load(run, state):
        seen.update(optimizer=run.optimizer, scaler=run.scaler, state=state)
        run.model.load_state_dict({key.removeprefix("odd/"): value for key, value in state.model.items()})
        run.scaler.load_state_dict(state.scaler)

    def make(model):
        return optimizer

    file = State({f"odd/{key}": value for key, value in weights().items()}, scaler=dict(SETTLED))
    run = make_run(model, optimizer=make, scaler={"init_scale": 2.0}, load=load)
    report = resume(run, {"optimizer": optimizer}, scaler, file)
    assert_same(model, weights())
    assert seen["optimizer"] is optimizer
    assert seen["scaler"] is scaler
    assert run.optimizer is make
    assert run.scaler == {"init_scale": 2.0}
    assert report.loaded == ("hook",)
    assert report.scaler_continued


def test_counts_of_batches_and_buffers_that_are_no_longer_saved_may_differ():
    model = Net()
    model.register_buffer("position_ids", torch.arange(3), persistent=False)
    state = weights() | {"position_ids": torch.arange(3)}
    state.pop("bn.num_batches_tracked")
    report = resume(make_run(model), {}, None, State(state))
    assert (report.missing, report.unexpected) == ((), ())


def test_a_model_that_refuses_by_itself_is_one_sentence():
    class Picky(Net):
        def _load_from_state_dict(self, *arguments):
            arguments[-1].append("not today")

    with pytest.raises(CheckpointError, match="the model refuses the checkpoint's weights: not today"):
        resume(make_run(Picky()), {}, None, State(weights()))


def test_capturable_state_is_usable_on_a_cpu_and_what_the_file_lacks_is_said():
    saved, model = trained(Net()).state_dict(), Net()
    saved["param_groups"][0]["capturable"] = True
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    run = make_run(model, scaler={})
    report = resume(run, {"optimizer": optimizer}, scaler, State(weights(), {"optimizer": saved}))
    assert (optimizer.param_groups[0]["capturable"], report.lacks) == (False, ("scaler",))
    assert resume(run, {"optimizer": optimizer}, None, State(weights())).lacks == ("optimizer",)
