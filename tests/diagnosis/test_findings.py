"""Findings: the code of the cause, a sentence with the numbers, the evidence behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.catalogue import effects, figure, rules
from ampdoctor.diagnosis.replay.nonfinite import CODES, HELP, STATE_CODES, origin_finding, state_finding
from ampdoctor.diagnosis.replay.scaler import dead_scaler_finding, lost_scale_finding
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.trace import Operand, Recomputation
from tests.diagnosis.births import origin, stats

BATCH = {"phase": "data", "came_from": "data", "nonfinite": "nan", "where": {"tensor": "x"}}
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
    assert finding.message == "step 3, net.fc: 262,016 is above fp16's largest value, 65,504 (4 times; aten.mul)"
    assert finding.evidence["log2_over_limit"] == 2.0
    assert finding.evidence["float64"] == {"finite": True, "amax": 262016.0, "limit": 65504.0}
    assert finding.evidence["harmed_count"] == 20
    assert len(finding.evidence["harmed"]) == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verdict": NOWHERE, "inputs": (stats(zeros=2),)}, "in fp64 as well: an input holds zeros"),
        ({"verdict": NOWHERE, "inputs": (stats(shape=(0, 3)),)}, "an input is empty"),
        ({"verdict": NOWHERE}, "the inputs are outside the op's domain"),
        (
            {"nonfinite": "nan", "operand": Operand(made_by="unwritten")},
            "the result holds NaN in memory that no op has written",
        ),
        ({"phase": "optimizer", "nonfinite": "nan"}, "the state's dtype loses what the update divides by"),
        (BATCH, "step 3, x: the batch holds NaN before the forward"),
        ({**BATCH, "index": (3, 17), "outputs": (stats(shape=(8, 1024), nans=5),)}, "at x[3, 17] (5 of 8,192 values)"),
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
            "its operand is 0, and 2e-08 in fp64, because fp16 has flushed 1e-08 to 0 (aten.mul; operand: aten.add at ",
        ),
        (
            {"made_by": "flushed", "op": "aten.exp", "float64": 1e-9, "amax": 1e-9},
            "fp16 has flushed up to 1e-09 to 0 (aten.mul; operand: aten.exp)",
        ),
        ({"made_by": "computed", "op": "aten.sub"}, "its operand is 0, in fp64 as well (aten.mul; operand: aten.sub)"),
        ({"made_by": "constant"}, "its operand is 0, which the code writes"),
        (
            {"made_by": "masked_row", "op": "aten.where"},
            "a whole row of its operand is masked (aten.mul; operand: aten.where)",
        ),
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
    [
        (True, "a partial result in the op is above fp16's largest value, 65,504"),
        (False, "the result does not fit fp64 either"),
    ],
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
    assert before.message == "step 0, net.weight: 3 of 4 values are not finite before the first step (state:weight)"
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
    ("scale", "end"), [(0.0, "0, and 1/scale is Inf"), (math.inf, "inf: every step"), (math.nan, "nan: every step")]
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
    assert "is 8 after 7 clean steps, but the run starts at 65,536" in quiet.message
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


def test_what_follows_from_a_diagnosed_step_is_its_effect():
    def at(code, step, severity="error", file="a"):
        return Finding(
            code=code, name="n", severity=severity, message="m", where=Where(step=step, phase="loss", file=file)
        )

    cause = at("AMP201", 15)
    later = [at("AMP722", 15), at("AMP723", 20, "warning"), at("AMP740", 15 + 256)]
    apart = [
        at("AMP722", 14),
        at("AMP723", 15 + 257),
        at("AMP729", 20),  # a schedule is the user's
        at("AMP722", 20, file="b"),
    ]
    assert effects([cause, *later, *apart]) == {1: 0, 2: 0, 3: 0}
    assert effects([at("AMP307", 15, "note"), at("AMP722", 16)]) == {}, "a note is no cause of an error"


@pytest.mark.parametrize(
    ("number", "said"), [(65504.0, "65,504"), (79713.27, "79,713"), (0.0123, "0.0123"), (3.39e38, "3.39e+38")]
)
def test_a_figure_is_short_and_has_separators(number, said):
    assert figure(number) == said
