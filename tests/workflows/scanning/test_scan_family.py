"""A folder of many checkpoints: which are opened, what is said of them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.series import SavedCheckpoint
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report_scan import ListedLog
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.scan import scan
from ampdoctor.workflows.scan_against import compare
from ampdoctor.workflows.scan_checkpoint import list_structure
from tests.workflows.scanning.trained import Training


@pytest.fixture
def opened(monkeypatch):
    """Return the names of the members that are opened, in the order of their opening."""
    names: list[str] = []
    real = SavedCheckpoint.open

    def spy(self):
        names.append(self.name)
        return real(self)

    monkeypatch.setattr(SavedCheckpoint, "open", spy)
    return names


def series(folder, count, first_sick=None):
    """Checkpoints of a training after 1, 2, ... steps; a NaN comes before the first sick one is saved."""
    training = Training()
    for number in range(1, count + 1):
        training.run(1)
        if number == first_sick:
            training.poison()
        training.save(folder / f"ckpt_{number}.pt")
    return folder


def verdicts(report):
    return {member["name"]: member["verdict"] for member in report.target["members"]}


def numbers(names):
    return [int(name.removeprefix("ckpt_").removesuffix(".pt")) for name in names]


def test_the_first_sick_of_twenty_is_found_by_halving(tmp_path, opened, check_report):
    report = scan(series(tmp_path / "run", 20, first_sick=13))
    assert numbers(opened) == [20, 10, 15, 13, 12]
    assert (report.verdict, report.complete) == ("sick", True)
    assert report.trend is not None
    assert (report.trend.first_sick, report.trend.last_healthy) == ("ckpt_13.pt", "ckpt_12.pt")
    assert {(f.code, f.where.global_step, f.where.file) for f in report.findings} == {("AMP101", 13, "ckpt_13.pt")}
    assert list(verdicts(report).items()) == [
        ("ckpt_10.pt", "healthy"),
        ("ckpt_12.pt", "healthy"),
        ("ckpt_13.pt", "sick"),
        ("ckpt_15.pt", "sick"),
        ("ckpt_20.pt", "sick"),
    ]
    shown = check_report(render_json(report))
    assert [point["step"] for point in shown["trend"]["points"]] == [10, 12, 13, 15, 20]
    assert shown["trend"]["points"][0]["roles"]["weight"]["amax"] > 0


@pytest.mark.parametrize("first_sick", [1, 5, 9])
def test_wherever_it_begins_it_and_the_one_before_it_are_read(tmp_path, opened, first_sick):
    report = scan(series(tmp_path, 9, first_sick=first_sick))
    read = set(numbers(opened))
    assert len(opened) == len(read) <= math.ceil(math.log2(9)) + 1
    assert {first_sick, max(first_sick - 1, 1)} <= read
    assert report.trend is not None
    assert report.trend.first_sick == f"ckpt_{first_sick}.pt"
    assert report.trend.last_healthy == (f"ckpt_{first_sick - 1}.pt" if first_sick > 1 else None)


def test_of_a_healthy_training_evenly_spread_ones_are_read(tmp_path, opened):
    report = scan(series(tmp_path, 20))
    assert (report.verdict, report.findings) == ("healthy", ())
    assert numbers(opened)[0] == 20
    assert sorted(numbers(opened)) == [1, 4, 7, 11, 14, 17, 20]
    assert report.trend is not None
    assert [point.scale for point in report.trend.points] == [65536.0] * 7
    assert all(point.loss > 0 for point in report.trend.points)


def without(*tensors):
    """Return what sets findings about these tensors aside."""

    def left(report):
        assert report.target["path"] == "run"
        return replace(report, findings=tuple(f for f in report.findings if f.where.tensor not in tensors))

    return left


def worse_later(folder, count=6, *, known=3, new=5):
    """Checkpoints: from `known` on one weight is NaN in them, from `new` on another one is, too."""
    training = Training()
    for number in range(1, count + 1):
        training.run(1)
        whole = copy.deepcopy(training.model.state_dict())
        with torch.no_grad():
            for name, parameter in training.model.named_parameters():
                if number >= {"inner.weight": known, "head.weight": new}.get(name, count + 1):
                    parameter[0, 0] = math.nan
        training.save(folder / "run" / f"ckpt_{number}.pt")
        training.model.load_state_dict(whole)
    return folder / "run"


@pytest.mark.parametrize("every_member", [False, True])
def test_what_is_set_aside_in_one_does_not_hide_what_is_new_in_a_later_one(tmp_path, every_member):
    run = worse_later(tmp_path)
    known = [f.where.tensor for f in scan(run).findings]
    report = scan(run, every_member=every_member, set_aside=without(*known))
    assert report.target["examined"]["name"] == "ckpt_5.pt"
    assert {f.where.tensor for f in report.findings} > set(known)
    assert "is the first that is sick in a way that has not been set aside" in report.trend.summary
    assert report.verdict == "sick"


@pytest.mark.parametrize(("known", "new"), [(5, 15), (1, 15), (4, 17)])
def test_both_the_first_that_counts_and_the_first_sick_one_are_read_with_their_neighbours(tmp_path, opened, known, new):
    run = worse_later(tmp_path, 16, known=known, new=new)
    report = scan(run, set_aside=without("inner.weight"))
    assert len(opened) == len(set(opened)) <= 2 * (math.ceil(math.log2(16)) + 1)
    first = new if new <= 16 else known
    assert {first, max(known - 1, 1), known} <= set(numbers(opened))
    assert report.trend.first_sick == f"ckpt_{first}.pt"
    assert report.trend.last_healthy == (f"ckpt_{known - 1}.pt" if known > 1 else None)
    if known < new <= 16:
        before = f"ckpt_{known - 1}.pt before it is healthy" if known > 1 else "there is none to read before it"
        assert f"the first sick one is ckpt_{known}.pt; {before}" in report.trend.summary
    said = next_step(report).said
    assert (f"ckpt_{known - 1}.pt, the last healthy one," if known > 1 else "no earlier one is healthy") in said


def test_where_all_is_set_aside_the_report_says_that_and_stays_sick(tmp_path):
    run = worse_later(tmp_path)
    report = scan(run, set_aside=lambda report: replace(report, findings=()))
    assert report.verdict == "sick"
    assert "all of it has been set aside" in report.trend.summary


@pytest.mark.parametrize("unreadable", [2, 6, 7, 12])
def test_the_search_goes_on_around_one_that_cannot_be_read(tmp_path, unreadable):
    series(tmp_path, 12, first_sick=7)
    (tmp_path / f"ckpt_{unreadable}.pt").write_bytes(b"PK\x03\x04 cut off")
    report = scan(tmp_path, every_member=unreadable == 2)
    first = 8 if unreadable == 7 else 7
    before = 5 if unreadable == 6 else 6
    assert report.trend is not None
    assert (report.trend.first_sick, report.trend.last_healthy) == (f"ckpt_{first}.pt", f"ckpt_{before}.pt")
    met = verdicts(report).get(f"ckpt_{unreadable}.pt")
    assert met in {"unreadable", None}
    assert report.complete == (met is None)
    assert [note.what for note in report.errors] == ([f"ckpt_{unreadable}.pt"] if met else [])


def test_where_none_can_be_read_the_reason_is_the_error(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step_{step}.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty"):
        scan(tmp_path)


def test_sickness_that_comes_and_goes_is_said(tmp_path):
    series(tmp_path, 9)
    sick = torch.load(tmp_path / "ckpt_1.pt")
    sick["model"]["head.bias"][0] = math.inf
    torch.save(sick, tmp_path / "ckpt_1.pt")
    report = scan(tmp_path)
    assert report.verdict == "sick"
    assert report.trend is not None
    assert (report.trend.first_sick, report.trend.monotone) == ("ckpt_1.pt", False)
    assert "comes and goes" in report.trend.summary


def test_the_log_beside_a_checkpoint_does_not_make_its_state_sick(tmp_path):
    for step in (10, 20, 30):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"w.weight": torch.ones(4, 4)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(
            f'{{"global_step": {step}, "log_history": [{{"step": 5, "loss": 1.5}}, {{"step": {step}, "loss": NaN}}]}}'
        )
    report = scan(tmp_path)
    assert report.trend is not None
    assert report.trend.first_sick is None
    assert [point.step for point in report.trend.points] == [10, 20, 30]


@pytest.mark.parametrize(
    ("scales", "clean", "sick", "healthy"),
    [
        ([4096.0, 512.0, 2.0, 2.0**-9, 2.0**-9], 900, None, "ckpt_3.pt"),  # at rest
        ([4096.0, 512.0, 2.0, 2.0**-9, 2.0**-9], 9, "ckpt_4.pt", "ckpt_3.pt"),  # falling
        ([4096.0, 512.0, 2.0, 2.0**-9, 2.0**-40], 900, "ckpt_5.pt", "ckpt_3.pt"),
        ([4096.0, 512.0, 2.0, 1.0, 1.0], 9, None, None),
    ],
)
def test_a_run_is_resumed_from_before_its_scale_collapsed(tmp_path, scales, clean, sick, healthy):
    training = Training()
    for number, scale in enumerate(scales, start=1):
        training.run(1)
        path = tmp_path / "run" / f"ckpt_{number}.pt"
        training.save(path)
        state = torch.load(path)
        torch.save({**state, "scaler": {**state["scaler"], "scale": scale, "_growth_tracker": clean}}, path)
    report = scan(tmp_path / "run")
    assert (report.trend.first_sick, report.trend.last_healthy) == (sick, healthy)
    step = next_step(report)
    first = "the first sick one is ckpt_4.pt; ckpt_3.pt before it is healthy"
    said = first if sick == "ckpt_4.pt" else "In ckpt_4.pt the loss scale has collapsed; ckpt_3.pt is before that"
    collapsed = said in report.trend.summary
    assert (f"resume from {healthy}" in step.said, collapsed) == (healthy is not None, healthy is not None)


@pytest.mark.parametrize(
    ("scales", "said", "healthy"),
    [
        ([64.0, 2.0**-9, 2.0**-9, 64.0, 64.0], "the state of none of those read is sick", None),
        ([64.0, 2.0**-9, 64.0, 2.0**-9, None], "In ckpt_4.pt the loss scale has collapsed; ckpt_3.pt is", "ckpt_3.pt"),
    ],
)
def test_a_scale_that_has_recovered_leaves_nothing_to_go_back_for(tmp_path, scales, said, healthy):
    training = Training().run(1)
    for number, scale in enumerate(scales, start=1):
        state = training.state() | {"global_step": number}
        scaler = state.pop("scaler")
        saved = {} if scale is None else {"scaler": {**scaler, "scale": scale, "_growth_tracker": 900}}
        torch.save(state | saved, tmp_path / f"ckpt_{number}.pt")
    report = scan(tmp_path, every_member=True)
    assert report.verdict == "healthy"
    assert said in report.trend.summary
    assert report.trend.last_healthy == healthy
    assert (f"resume from {healthy}" in next_step(report).said) is (healthy is not None)


def test_of_a_healthy_training_the_last_checkpoint_tells_more_than_the_model_left_beside_it(tmp_path):
    training = Training()
    for step in (1, 2, 3):
        training.run(1)
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(training.model.state_dict(), folder / "model.safetensors")
        torch.save(training.optimizer.state_dict(), folder / "optimizer.pt")
    save_file(training.model.state_dict(), tmp_path / "model.safetensors")
    report = scan(tmp_path)
    assert report.target["examined"] == {"name": "checkpoint-3", "step": 3}
    assert list(verdicts(report)) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "(final model)"]
    assert report.trend is not None
    assert (report.trend.unit, [point.step for point in report.trend.points]) == ("step", [1, 2, 3, None])
    training.poison()
    save_file(training.model.state_dict(), tmp_path / "model.safetensors")
    report = scan(tmp_path)
    assert report.trend is not None
    assert (report.trend.first_sick, report.trend.last_healthy) == ("(final model)", "checkpoint-3")
    assert [finding.where.file for finding in report.findings if finding.severity == "error"] == ["model.safetensors"]


@pytest.mark.parametrize("every_member", [False, True])
@pytest.mark.parametrize("name", ["best.safetensors", "ema.safetensors"])
def test_one_that_cannot_be_placed_is_read_beside_the_others(tmp_path, name, every_member):
    for epoch in (1, 2):
        save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / f"epoch_{epoch}.safetensors")
    save_file({"fc.weight": torch.full((4, 4), math.nan)}, tmp_path / name)
    report = scan(tmp_path, every_member=every_member)
    assert (report.verdict, report.skipped) == ("sick", ())
    assert verdicts(report)[name] == "sick"
    assert report.trend is not None
    assert (report.trend.first_sick, report.trend.last_healthy) == (name, None)
    assert report.trend.summary == (
        f"{name} is sick, and nothing tells when it was saved; of the 2 in order that were read none is (3 of 3 read)"
    )


def test_all_that_cannot_be_placed_are_read_the_best_first(tmp_path):
    for epoch in (1, 2):
        save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / f"epoch_{epoch}.safetensors")
    for name in ("average", "best", "copy", "ema", "other", "swa"):
        save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / f"{name}.safetensors")
    report = scan(tmp_path)
    names = ("best", "average", "copy", "ema", "other", "swa")
    assert list(verdicts(report))[2:] == [f"{name}.safetensors" for name in names]
    assert report.target["examined"]["name"] == "epoch_2.safetensors"


def test_what_else_lies_in_a_run_is_no_checkpoint_of_it(tmp_path):
    series(tmp_path, 3)
    torch.save({"x": torch.full((100, 3), math.nan)}, tmp_path / "features.pt")
    (tmp_path / "tokens.bin").write_bytes(b"\x00\x01" * 500)
    report = scan(tmp_path)
    assert (report.verdict, report.complete) == ("healthy", True)
    assert [skip.what for skip in report.skipped] == ["features.pt", "tokens.bin"]


@pytest.mark.parametrize("every_member", [False, True])
def test_the_newest_one_that_is_cut_off_is_met_although_another_stands_in_for_it(tmp_path, every_member):
    series(tmp_path, 8)
    newest = tmp_path / "ckpt_8.pt"
    whole = newest.read_bytes()
    (tmp_path / "last.pt").write_bytes(whole)
    (tmp_path / "ema.pt").write_bytes(whole)
    newest.write_bytes(whole[: len(whole) // 2])
    report = scan(tmp_path, every_member=every_member)
    assert (report.verdict, [note.what for note in report.errors]) == ("inconclusive", ["ckpt_8.pt"])
    assert report.target["examined"]["name"] == "last.pt"


def test_a_run_with_one_checkpoint_so_far_is_scanned_as_that_one(tmp_path):
    training = Training().run(2)
    folder = tmp_path / "run" / "checkpoint-2"
    folder.mkdir(parents=True)
    save_file(training.model.state_dict(), folder / "model.safetensors")
    report = scan(tmp_path / "run")
    assert (report.verdict, report.target["path"], report.trend) == ("healthy", "checkpoint-2", None)
    assert scan(folder) == report


def _log(path, steps, *, zero_from=math.inf, name="metrics.csv"):
    """A training log whose gradient norm is exactly 0 from a step on."""
    path.mkdir(parents=True, exist_ok=True)
    rows = [f"{step},{2.0 - 0.01 * (step % 7)},{0.5 if step < zero_from else 0.0}" for step in range(1, steps + 1)]
    (path / name).write_text("step,loss,grad_norm\n" + "\n".join(rows) + "\n")


def _bare(folder, steps, name="ckpt_{}.pt"):
    """Checkpoints of weights and a step."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        torch.save({"model": torch.nn.Linear(8, 8).state_dict(), "step": step}, folder / name.format(step))


@pytest.mark.parametrize(("checkpoints", "log"), [("", ""), ("checkpoints", ""), ("version_0", "version_0")])
def test_the_log_of_the_run_is_judged_once(tmp_path, checkpoints, log):
    _bare(tmp_path / checkpoints, (20, 40, 60))
    _log(tmp_path / log, 60, zero_from=40)
    report = scan(tmp_path)
    assert [finding.code for finding in report.findings] == ["AMP702"]
    assert [check.result for check in report.checks if check.name == "training log"] == ["found"]


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_the_log_of_a_run_with_one_checkpoint_so_far_is_judged_with_it(tmp_path, below):
    _bare(tmp_path / below / "checkpoint-20", (20,), name="model.pt")
    _log(tmp_path, 60, zero_from=40)
    (tmp_path / "other.jsonl").symlink_to(tmp_path / "gone")
    report = scan(tmp_path)
    assert [finding.code for finding in report.findings] == ["AMP702"]
    assert [skip.what for skip in report.skipped] == ["other.jsonl"]
    listed = list_structure(tmp_path).structure
    assert listed is not None
    assert listed.log == ListedLog(entries=60, first_step=1, last_step=60)
    compared = compare(tmp_path, tmp_path / below / "checkpoint-20")
    assert "AMP702" in {finding.code for finding in compared.findings}


def test_the_shorter_log_of_a_run_does_not_replace_that_of_its_only_checkpoint(tmp_path):
    _bare(tmp_path / "checkpoint-20", (20,), name="model.pt")
    _log(tmp_path / "checkpoint-20", 60)
    _log(tmp_path, 50, zero_from=40)
    assert scan(tmp_path).findings == ()


def test_the_checkpoint_before_the_first_step_has_no_loss_of_a_later_one(tmp_path):
    for step in (0, 30):
        _bare(tmp_path / f"checkpoint-{step}", (step,), name="model.pt")
        _log(tmp_path / f"checkpoint-{step}", 60)
    report = scan(tmp_path)
    assert report.trend is not None
    assert [point.loss for point in report.trend.points] == [None, pytest.approx(2.0 - 0.01 * 2)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_only_the_name_tells_is_the_targets(tmp_path, count):
    for step in range(4, 4 * count + 1, 4):
        (tmp_path / f"step-{step}").mkdir()
        save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / f"step-{step}" / "model.safetensors")
    assert scan(tmp_path).target["global_step"] == 4 * count
    assert scan(tmp_path / "step-4").target["global_step"] == 4
    (tmp_path / "step-4").rename(tmp_path / "run-4")
    assert scan(tmp_path / "run-4").target["global_step"] is None
