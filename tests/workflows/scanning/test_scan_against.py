"""A checkpoint beside an earlier one: what moved, what did not, and what came in between."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampdoctor.checkpoints import comparison, stored_tensor
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.stored_tensor import JoinedTensor, Shard, StridedTensor, side_by_side
from ampdoctor.errors import CheckpointError
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.scan_against import compare
from tests.workflows.scanning.trained import Training


def pair(folder, training, *, before, between):
    """Checkpoints of a training after some steps, and after more."""
    old = training.run(before).save(folder / "old.pt")
    return training.run(between).save(folder / "new.pt"), old


def codes(report):
    return [(finding.code, finding.severity) for finding in report.findings]


def rows(report):
    return {tensor.name: tensor for tensor in report.change.tensors}


def test_a_healthy_fp32_training_moves_everywhere(tmp_path, check_report, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = compare(*pair(tmp_path, Training(), before=20, between=30))
    assert (report.verdict, report.findings) == ("healthy", ())
    assert report.change.steps == 30
    assert report.change.roles["weight"].unchanged < 0.01
    assert 0.01 < report.change.roles["weight"].relative_change < 1
    shown = check_report(render_json(report))
    assert shown["target"]["against"] == {"path": "old.pt", "location": "old.pt", "global_step": 20}


def test_the_figures_are_those_of_torch(tmp_path):
    new, old = pair(tmp_path, Training(), before=5, between=5)
    first, second = (torch.load(path)["model"] for path in (old, new))
    for name, row in rows(compare(new, old)).items():
        a, b = first[name].double(), second[name].double()
        assert row.unchanged == float((a == b).double().mean())
        assert row.relative_change == pytest.approx(float((b - a).norm() / a.norm()))
        assert (row.amax, row.old_amax) == (float(b.abs().max()), float(a.abs().max()))


@pytest.mark.parametrize(("lr", "between"), [(1e-5, 60)])
def test_a_pure_bf16_training_with_a_small_rate_stands_still(tmp_path, lr, between):
    report = compare(*pair(tmp_path, Training(dtype=torch.bfloat16, lr=lr), before=20, between=between))
    assert report.verdict == "sick"
    (finding,) = [f for f in report.findings if f.code == "AMP712"]
    assert (finding.severity, finding.cause) == ("error", "optimizer_precision")
    assert finding.evidence["share_of_trained_elements"] > 0.5
    assert f"in {between} steps" in finding.message


def test_moments_whose_weights_are_not_known_by_name_serve_those_of_their_shape(tmp_path):
    training = Training(dtype=torch.bfloat16, lr=1e-6)
    training.model.inner = nn.Linear(16, 16, dtype=torch.bfloat16)
    training.model.norm = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(3)))
    training.model.head = nn.Linear(16, 4, dtype=torch.bfloat16)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-6)
    for step in (20, 60):
        training.run(step - training.step)
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(training.model.state_dict(), folder / "model.safetensors")
        torch.save(training.optimizer.state_dict(), folder / "optimizer.pt")
    report = compare(tmp_path / "checkpoint-60", tmp_path / "checkpoint-20")
    (finding,) = [f for f in report.findings if f.code == "AMP712"]
    assert (finding.severity, finding.evidence["steps"]) == ("error", 40)
    assert finding.evidence["share_of_trained_elements"] > 0.5


@pytest.mark.parametrize("lr", [1e-2])
def test_a_pure_bf16_training_that_learns_is_healthy(tmp_path, lr):
    report = compare(*pair(tmp_path, Training(dtype=torch.bfloat16, lr=lr), before=50, between=100))
    assert report.verdict == "healthy"
    assert not [f for f in report.findings if f.severity != "note"]


def test_norm_weights_at_one_stagnate_first_and_are_a_note(tmp_path):
    training = Training(dtype=torch.bfloat16, lr=1e-3)
    report = compare(*pair(tmp_path, training, before=50, between=50))
    assert report.verdict == "healthy"
    (finding,) = [f for f in report.findings if f.code == "AMP712"]
    assert (finding.severity, finding.where.tensor) == ("note", "norm.weight")


def test_the_end_of_a_schedule_is_no_stagnation(tmp_path):
    training = Training(dtype=torch.bfloat16, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: max(1 - step / 60, 0.0) ** 4)
    for _ in range(59):
        training.run(1)
        schedule.step()
        if training.step == 57:
            old = training.save(tmp_path / "old.pt")
    new = training.save(tmp_path / "new.pt")
    report = compare(new, old)
    assert report.change.roles["weight"].unchanged > 0.9
    assert [f for f in report.findings if f.severity == "error"] == []


def test_bf16_copies_of_fp32_weights_are_no_stagnation(tmp_path):
    training = Training(lr=1e-6).run(20)

    def copied():
        state = training.state()
        return {**state, "model": {name: w.bfloat16() for name, w in state["model"].items()}}

    torch.save(copied(), tmp_path / "old.pt")
    training.run(50)
    torch.save(copied(), tmp_path / "new.pt")
    report = compare(tmp_path / "new.pt", tmp_path / "old.pt")
    assert report.change.roles["weight"].unchanged > 0.75
    assert (report.verdict, report.findings) == ("healthy", ())


def test_frozen_layers_are_health(tmp_path):
    training = Training()
    training.model.inner.requires_grad_(False)
    training.optimizer = torch.optim.AdamW([p for p in training.model.parameters() if p.requires_grad])
    report = compare(*pair(tmp_path, training, before=5, between=20))
    assert (report.verdict, report.findings) == ("healthy", ())
    checks = {check.name: check.result for check in report.checks}
    assert checks["frozen weights"].startswith("2 did not change and have no moments, inner.weight first")


def test_steps_that_were_all_skipped_are_seen(tmp_path):
    training = Training().run(20)
    old = training.save(tmp_path / "old.pt")
    training.step += 50  # a loop that counts the steps that the scaler skips
    report = compare(training.save(tmp_path / "new.pt"), old)
    assert ("AMP713", "warning") in codes(report)


def test_a_nan_that_came_in_between_is_dated(tmp_path):
    training = Training().run(10)
    old = training.save(tmp_path / "old.pt")
    report = compare(training.run(10).poison().save(tmp_path / "new.pt"), old)
    (finding,) = [f for f in report.findings if f.code == "AMP101"]
    assert finding.message.endswith("It was finite at step 10: this came between then and step 20.")
    assert finding.evidence["appeared_between"] == [10, 20]


def test_a_nan_that_was_there_before_is_not_new(tmp_path):
    training = Training().run(10).poison()
    old = training.save(tmp_path / "old.pt")
    training.step += 1
    (finding,) = [f for f in compare(training.save(tmp_path / "new.pt"), old).findings if f.code == "AMP101"]
    assert "not finite at step 10 already" in finding.message
    assert (finding.evidence["old_nonfinite"], finding.evidence["appeared_between"]) == (1, None)


def test_growth_is_told_with_the_step_at_which_it_meets_fp16(tmp_path):
    training = Training().run(10)
    with torch.no_grad():
        training.model.head.weight[0, 0] = 100.0
    old = training.save(tmp_path / "old.pt")
    training.run(10)
    with torch.no_grad():
        training.model.head.weight[0, 0] = 3200.0
    report = compare(training.save(tmp_path / "new.pt"), old)
    assert codes(report) == [("AMP710", "warning")]
    (row,) = report.change.growth
    assert row.meets_at == pytest.approx(20 + 10 * math.log2(65504 / 3200) / 5)


def test_steps_are_read_from_names_where_none_is_stored(tmp_path):
    for step in (100, 300):
        save_file({"w.weight": torch.full((2, 2), float(step))}, tmp_path / f"model_step_{step}.safetensors")
    report = compare(tmp_path / "model_step_300.safetensors", tmp_path / "model_step_100.safetensors")
    assert report.change.steps == 200


def test_what_differs_in_structure_is_a_note(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "old.safetensors")
    save_file({"a": torch.ones(2).half(), "b": torch.ones(3), "d": torch.ones(2)}, tmp_path / "new.safetensors")
    report = compare(tmp_path / "new.safetensors", tmp_path / "old.safetensors")
    assert codes(report) == [("AMP714", "note")]
    assert (report.change.appeared, report.change.vanished) == (("d",), ("c",))
    assert report.change.reshaped == {"b": ((2,), (3,))}
    assert rows(report)["a"].unchanged == 1.0  # 1 is 1 in every format


def test_layouts_of_memory_do_not_matter(tmp_path):
    values = torch.randn(5, 7)
    torch.save({"w": values.t().contiguous().t(), "v": torch.randn(4, 6)[:, ::2]}, tmp_path / "old.pt")
    old = torch.load(tmp_path / "old.pt")
    torch.save({"w": values.clone(), "v": old["v"].clone()}, tmp_path / "new.pt")
    report = compare(tmp_path / "new.pt", tmp_path / "old.pt")
    assert {name: row.unchanged for name, row in rows(report).items()} == {"w": 1.0, "v": 1.0}


def test_pieces_are_compared_with_the_whole(tmp_path, monkeypatch):
    values = torch.randn(6, 4)
    save_file({"w": values, "top": values[:2].clone(), "rest": values[2:].clone()}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        stored = {ref.name: ref.stored for ref in checkpoint}
        top, rest = stored["top"], stored["rest"]
        assert isinstance(top, StridedTensor)
        assert isinstance(rest, StridedTensor)
        whole = JoinedTensor(
            dtype=torch.float32, shape=(6, 4), shards=(Shard(stored=rest, at=(2, 0)), Shard(stored=top, at=(0, 0)))
        )
        found = comparison.difference(whole, stored["w"])
        assert (found.elements, found.unchanged) == (24, 24)
        alike = comparison.difference(whole, whole)
        assert (alike.elements, alike.unchanged) == (24, 24)
        monkeypatch.setattr(stored_tensor, "MAX_LOADED_BYTES", 64)
        with pytest.raises(CheckpointError, match="different orders"):
            list(side_by_side(whole, stored["w"]))


def test_what_is_too_large_to_be_rearranged_is_left_out_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensor, "MAX_LOADED_BYTES", 64)
    torch.save({"w": torch.randn(5, 7).t(), "b": torch.ones(3)}, tmp_path / "old.pt")
    torch.save({"w": torch.randn(7, 5), "b": torch.ones(3)}, tmp_path / "new.pt")
    report = compare(tmp_path / "new.pt", tmp_path / "old.pt")
    assert [skip.what for skip in report.skipped] == ["w"]
    assert list(rows(report)) == ["b"]


def test_files_with_nothing_in_common_are_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "old.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "new.safetensors")
    with pytest.raises(CheckpointError, match="no tensor of one name and shape"):
        compare(tmp_path / "new.safetensors", tmp_path / "old.safetensors")


def test_a_folder_of_many_is_refused_with_an_example(tmp_path):
    training = Training()
    for _ in range(2):
        training.run(1).save(tmp_path / "run" / f"step_{training.step}.pt")
    single = training.save(tmp_path / "one.pt")
    with pytest.raises(CheckpointError, match=r"run holds 2 checkpoints; name one of them, for example step_2\.pt"):
        compare(tmp_path / "run", single)


def test_the_wrong_order_is_said(tmp_path):
    new, old = pair(tmp_path, Training(), before=5, between=5)
    checks = {check.name: check.result for check in compare(old, new).checks}
    assert "saved after" in checks["order"]


def test_growth_by_the_last_bit_of_a_double_is_none(tmp_path):
    """Its logarithm is the same, and a rate of 0 meets no limit."""
    for step, value in ((100, 1000.0), (200, math.nextafter(1000.0, math.inf))):
        weight = torch.tensor([[value, 1.0]], dtype=torch.float64)
        torch.save({"model": {"w": weight}, "step": step}, tmp_path / f"{step}.pt")
    report = compare(tmp_path / "200.pt", tmp_path / "100.pt")
    assert report.change is not None
    assert report.change.growth == ()
