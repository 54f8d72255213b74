"""Findings: the code of the cause, a sentence with the numbers, the evidence behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.loaded_state import state_finding
from ampdoctor.diagnosis.replay.nonfinite import CODES, HELP, STATE_CODES, origin_finding
from ampdoctor.diagnosis.replay.scaler_misuse import lost_scale_finding
from ampdoctor.diagnosis.replay.scaler_state import dead_scaler_finding
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.trace import Operand, Recomputation
from tests.diagnosis.births import origin, stats

OVER, NOWHERE, UNDER = (True, 4 * 65504.0, 65504.0), (False, 0.0, 65504.0), (True, 1.0, 65504.0)


def test_every_cause_has_a_code_of_the_catalogue_and_advice():
    assert CODES.keys() == HELP.keys()
    assert {*CODES.values(), *STATE_CODES.values()} <= rules().keys()


def test_an_overflow_in_numbers():
    finding = origin_finding(origin(verdict=OVER, affected=tuple(f"grad:{i}" for i in range(20))))
    assert (finding.code, finding.name, finding.cause, finding.severity) == (
        "AMP201",
        "forward-overflow",
        "forward_overflow",
        "error",
    )
    assert "step 3, forward: aten.mul in module net.fc makes an infinity from finite inputs" in finding.message
    assert "2.62e+05 in float64, 4 times float16's largest value 65504" in finding.message
    assert finding.evidence["log2_over_limit"] == 2.0
    assert finding.evidence["float64"] == {"finite": True, "amax": 262016.0, "limit": 65504.0}
    assert finding.evidence["harmed_count"] == 20
    assert len(finding.evidence["harmed"]) == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verdict": NOWHERE, "inputs": (stats(zeros=2),)}, "in float64 as well: an input holds zeros"),
        ({"verdict": NOWHERE, "inputs": (stats(shape=(0, 3)),)}, "an input is empty"),
        ({"verdict": NOWHERE}, "the inputs are outside the op's domain"),
        ({"nonfinite": "nan", "operand": Operand(made_by="unwritten")}, "it shows memory that no op has written"),
        ({"phase": "optimizer", "nonfinite": "nan"}, "the state's format loses what the update divides by"),
        (
            {"phase": "data", "came_from": "data", "nonfinite": "nan", "where": {"tensor": "x"}},
            "the batch itself holds NaN (in x)",
        ),
        ({"phase": "forward", "where": {"module": ""}, "verdict": OVER}, "in the model's own forward"),
    ],
)
def test_the_sentence_says_what_made_it(given, words):
    assert words in origin_finding(origin(**given)).message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {
                "made_by": "flushed_epsilon",
                "op": "aten.add",
                "source": Source("a.py", 3),
                "float64": 2e-8,
                "amax": 1e-8,
            },
            "its operand is 0 (in float64 2e-08), because aten.add at a.py:3 flushed 1e-08 to 0 in float16",
        ),
        ({"made_by": "flushed", "op": "aten.exp", "float64": 1e-9, "amax": 1e-9}, "aten.exp flushed up to 1e-09 to 0"),
        ({"made_by": "computed", "op": "aten.sub"}, "its operand is 0, and aten.sub makes that in float64 as well"),
        ({"made_by": "constant"}, "its operand is 0, which the code writes"),
        ({"made_by": "masked_row", "op": "aten.where"}, "a whole row of its operand is masked (aten.where)"),
        ({"made_by": "data"}, "its operand is 0, which came from the batch"),
        ({"made_by": "optimizer_state:a.w:exp_avg_sq"}, "which came from the optimizer state a.w:exp_avg_sq"),
    ],
)
def test_the_sentence_says_what_made_the_operand(given, words):
    operand = Operand(**{"here": 0.0, "dtype": "float16", **given})
    finding = origin_finding(origin(verdict=NOWHERE, operand=operand))
    assert words in finding.message
    assert finding.evidence["operand"]["made_by"] == given["made_by"]


@pytest.mark.parametrize(
    ("finite", "words"),
    [(True, "a partial result inside the op goes beyond float16"), (False, "the result is beyond float64 as well")],
)
def test_overflows_that_no_number_of_float64_shows(finite, words):
    verdict = Recomputation(finite=finite, amax=0.0, limit=65504.0, overflow=True)
    finding = origin_finding(replace(origin(), recomputed=verdict))
    assert finding.cause == "forward_overflow"
    assert words in finding.message


@pytest.mark.parametrize("kind", ["param", "buffer", "optimizer_state"])
def test_state_has_a_code_for_each_kind(kind):
    finding = origin_finding(origin("checkpoint", came_from=kind, where={"tensor": "net.fc.weight"}))
    assert finding.code == STATE_CODES[kind]
    where = Where(step=0, phase="checkpoint", module="net", op="state:weight", tensor="net.weight", nonfinite="nan")
    before = state_finding(kind, where, stats(nans=2, infs=1))
    assert before.code == STATE_CODES[kind]
    assert "net.weight (state:weight) holds 3 non-finite values before the first step" in before.message
    assert before.prescription.status == "not_run"


def test_other_births_are_named_beside_it():
    finding = origin_finding(origin(verdict=OVER), others=[origin("loss", kernel="aten.log", where={"module": ""})])
    assert finding.evidence["also"] == [{"phase": "loss", "module": "", "op": "aten.log", "nonfinite": "inf"}]


def test_the_fingerprint_is_of_the_place_and_not_of_values_or_step():
    first = origin_finding(origin(verdict=OVER))
    again = origin_finding(origin(verdict=(True, 1e9, 65504.0), where={"step": 8}))
    other = origin_finding(origin(verdict=OVER, where={"module": "net.other"}))
    assert first.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("scale", "end"), [(0.0, "0, so 1/scale is infinite"), (math.inf, "inf: every step"), (math.nan, "nan: every step")]
)
def test_a_dead_scale(scale, end):
    finding = dead_scaler_finding(scale, 2.0**-128, Where(step=0, phase="scaler"), None)
    assert (finding.code, finding.cause, finding.severity) == ("AMP401", "bad_checkpoint", "error")
    assert f"before the first step the loss scale is {end}" in finding.message


def test_a_settled_scale_that_is_not_continued():
    lost = ScalerState(scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, growth_tracker=7)
    quiet = lost_scale_finding(lost, 65536.0)
    loud = lost_scale_finding(lost, None, origin("backward", verdict=OVER), None)
    assert (quiet.severity, loud.severity) == ("warning", "error")
    assert "had settled at 8 (7 clean steps), but the run starts at 65536" in quiet.message
    assert "the run has no scaler, and every step is skipped" in loud.message
    assert (quiet.where.op, loud.where.phase) == ("scaler_state", "scaler")


def test_the_fingerprint_of_several_places_does_not_change_with_one_more():
    def about(*tensors, op="state:weight", **evidence):
        first, *others = (Where(phase="checkpoint", module=name, op=op, tensor=f"{name}.weight") for name in tensors)
        return Finding(
            code="AMP104", name="n", severity="note", message="m", where=first, also=tuple(others), evidence=evidence
        )

    known = about("c", "d").fingerprint
    assert about("c", "d", "a").fingerprint == about("b", "d", "c").fingerprint == known
    assert about("c", "d", op="state:bias").fingerprint != known
    assert about("c", "d", role="ema").fingerprint != about("c", "d", role="weight").fingerprint
    assert about("c").fingerprint != about("d").fingerprint
