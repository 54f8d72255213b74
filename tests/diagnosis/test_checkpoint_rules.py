from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from ampdoctor.diagnosis.catalogue import SCANNED, find_rule, judge, rules
from ampdoctor.diagnosis.scan.checks import checks_of
from ampdoctor.diagnosis.scan.tensors import MAX_FINDINGS, is_mask
from ampdoctor.errors import UsageError
from ampdoctor.evidence.checkpoint_stats import CastLoss, CheckpointSummary, LogTail, RoleSummary, ScalerState
from tests.diagnosis.summaries import moment, tensor

FOLDER = Path(__file__).parent


def cast(name="fp16", **changes) -> CastLoss:
    values = {"flushed": 0.0, "subnormal": 0.0, "overflowed": 0.0, "relative_error": 2e-4, "headroom": 10.0}
    return CastLoss(format=name, **(values | changes))


def scaler(scale=1024.0, **changes) -> ScalerState:
    return ScalerState(scale=scale, file="c.pt", **changes)


def found(*tensors, scalers=(), log=None) -> list[tuple[str, str]]:
    summary = CheckpointSummary(format="torch-zip", tensors=tensors, scalers=tuple(scalers), log=log)
    return [(f.code, f.severity) for f in judge(summary)]


SICK = [
    ("AMP101", "error", tensor(nan=1)),
    ("AMP101", "error", tensor(pos_infs=1, zeros=63, amax=None, amin=None)),
    ("AMP102", "error", tensor("bn.running_mean", role="buffer", nan=1)),
    ("AMP102", "error", tensor("attn.mask", role="buffer", nan=1)),
    ("AMP102", "error", tensor("q.min_val", role="buffer", pos_infs=1)),
    ("AMP103", "error", moment(pos_infs=3)),
    ("AMP103", "error", moment("step", role="other", nan=1, examined=1)),
    ("AMP104", "warning", tensor(amax=65520.0)),
    ("AMP104", "note", tensor(amax=9e4, dtype="bfloat16")),
    ("AMP104", "note", tensor("bn.running_var", role="buffer", amax=9e4, shape=(8,))),
    ("AMP105", "note", tensor(casts=(cast(relative_error=0.01, subnormal=0.9),))),
    ("AMP105", "warning", tensor(casts=(cast(relative_error=0.9, flushed=0.5),))),
    ("AMP105", "note", tensor(casts=(cast("bf16", relative_error=math.inf, overflowed=0.1),))),
    ("AMP106", "error", tensor("bn.running_var", role="buffer", negatives=1, lowest=-0.1)),
    ("AMP106", "warning", tensor("bn.running_var", role="buffer", negatives=1, lowest=-1e-7)),
    ("AMP106", "error", moment(negatives=1, lowest=-1e-12)),
    ("AMP107", "warning", tensor(dtype="float16", amax=65504.0, at_max=1)),
    ("AMP107", "warning", tensor(dtype="float8_e4m3fn", amax=448.0, at_max=5, examined=64)),
    ("AMP107", "warning", tensor(amax=65504.0)),  # clamped to fp16, stored in fp32
    ("AMP108", "warning", tensor("shadow_params.0", role="other", nan=1)),
]

HEALTHY = [
    tensor(),
    tensor(neg_infs=28, zeros=36, amax=None, amin=None),  # an additive mask under any name
    tensor("attn.masked_bias", role="buffer", neg_infs=1, examined=1, shape=(), amax=None, amin=None),
    tensor("attn.masked_bias", role="buffer", amax=1e9, amin=1e9, examined=1, shape=()),
    tensor("bias", dtype="float16", amax=65504.0, amin=65504.0, zeros=36, at_max=28),  # finfo.min and zeros
    tensor("bias", amax=3.4028234663852886e38, amin=3.4028234663852886e38, zeros=36, at_max=28),
    tensor("q.min_val", role="buffer", pos_infs=1, examined=1, amax=None, amin=None),
    tensor(amax=65519.0),
    tensor(amax=65504.0, constant=65504.0),
    tensor(amax=65504.0, amin=65504.0, zeros=36),  # a mask
    tensor(casts=(cast(relative_error=2.0**-8), cast("bf16", relative_error=1.7e-3))),
    moment(negatives=0),
    tensor(dtype="float8_e4m3fn", amax=448.0, at_max=4, examined=64),
    tensor(examined=0, amax=None, amin=None, shape=(0, 3)),
]


@pytest.mark.parametrize(("code", "severity", "sick"), SICK)
def test_each_rule_catches_its_sick_case_and_nothing_else_fires(code, severity, sick):
    assert found(tensor("other.weight"), sick) == [(code, severity)]


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda t: f"{t.name}-{t.dtype}-{t.amax}")
def test_healthy_tensors_are_left_alone(healthy):
    assert found(healthy) == []


@pytest.mark.parametrize(
    ("code", "severity", "sick"),
    [
        ("AMP401", "error", scaler(0.0)),
        ("AMP401", "error", scaler(math.inf)),
        ("AMP401", "error", scaler(math.nan)),
        ("AMP402", "warning", scaler(0.5)),
        ("AMP402", "error", scaler(2.0**-4)),
        ("AMP402", "error", scaler(2.0**-9, growth_tracker=10)),
        ("AMP402", "warning", scaler(2.0**-9, growth_tracker=11)),
        ("AMP402", "error", scaler(2.0**-127)),
        ("AMP403", "warning", scaler(growth_tracker=2000)),
        ("AMP404", "warning", scaler(backoff_factor=1.0)),
        ("AMP404", "warning", scaler(backoff_factor=math.nan)),
        ("AMP404", "warning", scaler(growth_factor=0.5)),
        ("AMP404", "warning", scaler(-1024.0)),
        ("AMP404", "warning", scaler(growth_tracker=-5)),
        ("AMP408", "warning", scaler(1.0, min_scale=1.0)),
        ("AMP408", "note", scaler(1.0, min_scale=1.0, growth_tracker=40)),
    ],
)
def test_each_scaler_rule_catches_its_sick_case(code, severity, sick):
    assert found(tensor(), scalers=[sick]) == [(code, severity)]


@pytest.mark.parametrize(
    "healthy",
    [
        scaler(1.0),
        scaler(1.0, growth_factor=1.0, backoff_factor=1.0, min_scale=1.0),
        scaler(2.0**40, growth_factor=1.0, backoff_factor=1.0),
        scaler(growth_tracker=1999),
        scaler(growth_factor=1.0),
        scaler(growth_interval=10**9),
    ],
)
def test_healthy_scalers_are_left_alone(healthy):
    assert found(tensor(), scalers=[healthy]) == []


def test_a_small_scale_is_harmful_only_for_small_gradients():
    """2^-8 with a norm of 1 over 1024 weights is fine, over 1e9 it is not, and a logged norm of 1e6 saves it."""
    large = tensor(examined=10**9)
    resting = scaler(2.0**-8, growth_tracker=500)
    assert found(tensor(), scalers=[resting]) == [("AMP402", "warning")]
    assert found(large, scalers=[resting]) == [("AMP402", "error")]
    logged = LogTail(norms=(1e6,) * 10)
    assert found(large, scalers=[resting], log=logged) == [("AMP402", "warning")]


@pytest.mark.parametrize(
    ("step", "tracker", "severity"),
    [
        (0, 0, "warning"),  # saved before the first step
        (7, 7, "warning"),  # no step of the run has overflowed
        (4000, 0, "warning"),  # nor here: it has just grown
        (4003, 0, "error"),
        (None, 0, "error"),
    ],
)
def test_a_low_scale_that_was_chosen_is_not_falling(step, tracker, severity):
    low = scaler(2.0**-8, growth_tracker=tracker)
    summary = CheckpointSummary(format="torch-zip", tensors=(tensor(),), scalers=(low,), global_step=step)
    assert [(f.code, f.severity) for f in judge(summary)] == [("AMP402", severity)]


def test_where_says_owner_entry_and_file():
    summary = CheckpointSummary(
        format="torch-zip",
        tensors=(
            moment(name="gate.weight", module="gate", pos_infs=2),
            tensor("ln.weight", module="ln", group="ema", nan=1),
        ),
        scalers=(scaler(0.0),),
        global_step=70,
    )
    places = {f.code: f.where for f in judge(summary)}
    state, weight = places["AMP103"], places["AMP101"]
    assert (state.module, state.op, state.nonfinite) == ("gate", "optimizer_state:exp_avg_sq", "inf")
    assert (weight.module, weight.op, weight.tensor) == ("ln", "state:weight", "ema.ln.weight")
    assert (places["AMP401"].op, places["AMP401"].file) == ("scaler_state", "c.pt")
    assert {w.phase for w in places.values()} == {"checkpoint"}
    assert {w.global_step for w in places.values()} == {70}
    assert {f.cause for f in judge(summary)} == {"bad_checkpoint"}


@pytest.mark.parametrize(
    ("code", "sick"),
    [
        ("AMP101", {"nan": 64}),
        ("AMP104", {"amax": 9e4}),
        ("AMP107", {"dtype": "float16", "amax": 65504.0, "at_max": 1}),
    ],
)
def test_no_sick_tensor_is_without_an_address_however_many_there_are(code, sick):
    names = sorted(f"l{i}.weight" for i in range(300))
    summary = CheckpointSummary(format="torch-zip", tensors=tuple(tensor(name, **sick) for name in names))
    findings = [f for f in judge(summary) if f.code == code]
    assert len(findings) in {1, MAX_FINDINGS + 1}  # it does not fill pages
    assert sorted(where.tensor for f in findings for where in f.places) == names


def test_every_rule_has_a_sick_case_here():
    scanned = {code for code, rule in rules().items() if rule.commands == SCANNED and code[:4] in {"AMP1", "AMP4"}}
    worst = {code: rules()[code].worst for code, severity, _ in SICK if severity == "error"}
    assert set(worst.values()) == {"error"}
    elsewhere = {"AMP109", "AMP110", "AMP111", "AMP112", "AMP410"}  # test_state_rules.py
    scalers = {"AMP401", "AMP402", "AMP403", "AMP404", "AMP408"}  # test_run_scaler_rules.py
    own = {code for code in scanned if (FOLDER / f"test_{rules()[code].name.replace('-', '_')}.py").exists()}
    assert {code for code, _, _ in SICK} | scalers | elsewhere | own == scanned


def test_rules_are_found_by_code_and_name_and_near_misses_are_named():
    assert find_rule("amp101").name == "non-finite-weight"
    assert find_rule("dead-scaler").code == "AMP401"
    with pytest.raises(UsageError, match="dead-scaler"):
        find_rule("ded-scaler")


def test_the_rules_need_no_torch():
    code = (
        "import sys, ampdoctor.diagnosis.scan.checks\n"
        "ampdoctor.diagnosis.catalogue.rules()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_weights_buffers_and_averages_are_never_one_pile():
    tensors = (
        tensor(amax=9e4),
        tensor(amax=9e4, nan=1, role="ema", group="ema"),
        tensor("bn.running_var", role="buffer", amax=9e4),
    )
    roles = tuple(RoleSummary(role=r, tensors=1, elements=64, amax=1.0, amin=1.0, casts=()) for r in ("weight", "ema"))
    summary = CheckpointSummary(format="torch-zip", tensors=tensors, roles=roles)
    findings = judge(summary)
    assert sorted((f.code, f.evidence["role"]) for f in findings) == [
        ("AMP101", "ema"), ("AMP104", "buffer"), ("AMP104", "ema"), ("AMP104", "weight"),
    ]  # fmt: skip
    assert "ema.fc.weight, an averaged copy, holds 1 NaN among 1,024 values in fp32." in [f.message for f in findings]
    checks = {check.name: check.result for check in checks_of(summary, findings)}
    assert (checks["finite weights"], checks["finite averaged weights"]) == ("ok", "found")


@pytest.mark.parametrize(("fill", "taken"), [(1e4, True), (65504.0, True), (9.9e3, False)])
def test_zeros_and_one_large_value_are_a_mask_from_gpt2s_value_on(fill, taken):
    assert is_mask(tensor("attn.masked_bias", role="buffer", amax=fill, amin=fill)) is taken
    assert is_mask(tensor(amax=fill, amin=fill, zeros=36)) is taken
    assert not is_mask(tensor(amax=fill, amin=fill / 2, zeros=36))
