from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampdoctor.errors import CheckpointError
from ampdoctor.workflows.scan import scan

CASES = Path(__file__).parents[3] / "fixtures" / "corpus" / "cases"


def write_case(name: str, folder: Path) -> Path:
    spec = importlib.util.spec_from_file_location(f"corpus_{name}", CASES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    case = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    path = folder / f"{name}.pt"
    case.write_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("name", "code", "cause", "place"),
    [
        ("adam_state_inf_checkpoint", "AMP103", "bad_checkpoint", ("gate", "optimizer_state:exp_avg_sq", "inf")),
        (
            "bf16_checkpoint_saved_as_fp16",
            "AMP101",
            "bad_checkpoint",
            ("encoder.block.1.layer.0.layer_norm", "state:weight", "inf"),
        ),
        ("nan_buffer_frozen_bn", "AMP102", "bad_checkpoint", ("stages.2.bn_pw", "state:running_mean", "nan")),
        ("scaler_state_zero_checkpoint", "AMP401", "bad_checkpoint", ("", "scaler_state", "inf")),
        ("scale_collapsed_then_underflow", "AMP402", "scaler_collapse", ("", "scaler_state", "none")),
    ],
)
def test_a_sick_corpus_checkpoint_is_diagnosed_by_the_file_alone(tmp_path, name, code, cause, place):
    report = scan(write_case(name, tmp_path))
    assert report.verdict == "sick"
    errors = [f for f in report.findings if f.severity == "error"]
    assert {f.cause for f in errors} == {cause}
    # stored in fp16 once: what is too large is Inf, and in other tensors what is too small is 0
    also = {"AMP502"} if code == "AMP103" else set()
    assert {f.code for f in errors} == {code} | also
    assert {(f.where.module, f.where.op, f.where.nonfinite) for f in errors if f.code == code} == {place}
    assert all("they were in fp16 once" in f.message for f in errors if f.code in also)


@pytest.mark.parametrize(
    ("scales", "shown"), [((65536.0, 0.0), 0.0), ((0.25, 2.0**40), 0.25), ((65536.0, 1024.0), 1024.0)]
)
def test_of_several_scalers_the_one_that_is_spoken_of_is_shown_else_the_lowest(tmp_path, scales, shown):
    entries = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    scalers = {f"scaler_{at}": {"scale": scale, **entries} for at, scale in enumerate(scales)}
    torch.save({"model": {"w": torch.ones(4, 4)}, **scalers}, tmp_path / "gan.pt")
    report = scan(tmp_path / "gan.pt")
    assert report.scaler is not None
    assert report.scaler.current["scale"] == shown
    (check,) = [check for check in report.checks if check.name == "loss scaler"]
    assert check.headroom == ({"log2_above_dead": math.log2(shown) + 128} if shown else {})


class Masked(nn.Module):
    """A healthy model with everything that looks alarming."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        upper = torch.ones(8, 8, dtype=torch.bool).triu(1)
        self.attn = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.register_buffer("causal_mask", torch.zeros(8, 8, dtype=dtype).masked_fill(upper, -math.inf))
        self.register_buffer("bias_table", torch.zeros(8, 8, dtype=dtype).masked_fill(upper, torch.finfo(dtype).min))
        self.register_buffer("masked_bias", torch.tensor(-1e4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_raise_no_alarm(tmp_path, dtype):
    torch.manual_seed(4)
    model = Masked(dtype)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    torch.save({"model": model.state_dict(), "scaler": torch.amp.GradScaler("cpu").state_dict()}, tmp_path / "m.pt")
    for name in ("m.safetensors", "m.pt"):
        report = scan(tmp_path / name)
        assert (report.verdict, report.findings) == ("healthy", ())
        assert any(check.name == "masks" for check in report.checks)


def test_a_healthy_training_state_is_healthy_and_shows_its_headroom(tmp_path):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    report = scan(tmp_path / "c.pt")
    assert (report.verdict, report.findings, report.complete) == ("healthy", (), True)
    checks = {check.name: check for check in report.checks}
    assert checks["finite weights"].result == checks["finite optimizer state"].result == "ok"
    assert checks["loss scaler"].result == "not in the file"
    assert 14 < checks["fp16 range"].headroom["log2"] < 17
    assert 1e-4 < checks["fp16 cast of the weights"].headroom["relative_error"] < 4e-4
    assert 1e-3 < checks["bf16 cast of the weights"].headroom["relative_error"] < 2.5e-3
    assert report.target["global_step"] == 3


def test_the_share_that_a_cast_flushes_is_that_of_the_cast(tmp_path):
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(256, 256, generator=generator) * 2.0**-26
    save_file({"fc.weight": weights}, tmp_path / "m.safetensors")
    (finding,) = scan(tmp_path / "m.safetensors").findings
    truth = float((weights.half() == 0).double().mean())
    assert (finding.code, finding.severity) == ("AMP105", "warning")
    assert finding.evidence["fp16"][0]["flushed"] == pytest.approx(truth, abs=1e-3)


def test_impossible_and_saturated_values_are_counted_exactly(tmp_path):
    variance = torch.ones(64)
    variance[[3, 9]] = torch.tensor([-0.5, -2.0])
    clamped = torch.randn(8, 8).half()
    clamped[0, :3] = torch.tensor([65504.0, -65504.0, 65504.0]).half()
    save_file({"bn.running_var": variance, "fc.weight": clamped}, tmp_path / "m.safetensors")
    findings = {f.code: f for f in scan(tmp_path / "m.safetensors").findings}
    assert set(findings) == {"AMP106", "AMP107"}
    assert (findings["AMP106"].evidence["negatives"], findings["AMP106"].evidence["lowest"]) == (2, -2.0)
    assert findings["AMP107"].evidence["at_max"] == 3


def test_fp8_values_are_examined_in_their_own_format(tmp_path):
    values = torch.randn(64, 64).to(torch.float8_e5m2)
    values[0, 0] = math.inf
    save_file(
        {"fc.weight": values, "fine.weight": torch.randn(64, 64).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors"
    )
    report = scan(tmp_path / "m.safetensors")
    assert [(f.code, f.where.tensor, f.evidence["pos_infs"]) for f in report.findings] == [("AMP101", "fc.weight", 1)]


def test_a_missing_shard_is_inconclusive_never_healthy(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "m-00001-of-00002.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}'
    )
    report = scan(tmp_path)
    assert (report.verdict, report.complete) == ("inconclusive", False)
    assert report.errors[0].kind == "missing"


@pytest.mark.parametrize("state", [{"ids": torch.arange(4)}, {"w": torch.empty(0)}, {"note": "text"}])
def test_a_file_with_nothing_to_examine_is_an_error(tmp_path, state):
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="nothing to examine"):
        scan(tmp_path / "c.pt")


def test_the_command_line_scans(tmp_path, run_cli, run_here):
    sick, healthy = (
        write_case("adam_state_inf_checkpoint", tmp_path),
        write_case("scaler_state_lost_on_resume", tmp_path),
    )
    (tmp_path / "empty.pt").touch()
    asked = ((run_cli, sick), (run_here, healthy), (run_here, tmp_path / "empty.pt"))
    assert [run("scan", str(path), "--format", "json").returncode for run, path in asked] == [1, 0, 2]


def test_progress_ends_at_the_total(tmp_path):
    save_file({"a": torch.ones(100), "b": torch.ones(50)}, tmp_path / "m.safetensors")
    seen: list[tuple[str, int, int | None, str]] = []
    scan(tmp_path / "m.safetensors", progress=lambda *what, unit="": seen.append((*what, unit)))
    assert seen == [("a", 400, 600, "B"), ("b", 600, 600, "B")]


def test_loose_masks_stay_harmless_and_what_lies_beside_weights_is_told(tmp_path):
    mask = torch.full((3, 3), float("-inf")).triu(1)
    torch.save([torch.ones(2), mask, torch.tensor(float("inf"))], tmp_path / "loose.pt")
    torch.save({"model": {"w": torch.ones(2)}, "losses": [torch.full((3,), float("nan"))]}, tmp_path / "beside.pt")
    loose, beside = scan(tmp_path / "loose.pt"), scan(tmp_path / "beside.pt")
    assert (loose.verdict, [finding.code for finding in loose.findings]) == ("healthy", [])
    assert (beside.verdict, [finding.code for finding in beside.findings]) == ("healthy", ["AMP108"])
