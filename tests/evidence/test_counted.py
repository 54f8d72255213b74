"""A bundle's report counts in the training's steps; what the user has written stays as it is."""

from __future__ import annotations

from dataclasses import replace

from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Check, ErrorNote, Finding, Report, Skipped, renumber_steps

WHERE = Where(
    step=0, phase="forward", module="blocks.step 3", op="aten.linear", tensor="step 0.weight", source=Source("a.py", 1)
)
FINDING = Finding(
    code="AMP202",
    name="forward-overflow",
    severity="error",
    message="At step 0 the module blocks.3 overflows; the loop said: loss is NaN at step 31000.",
    where=WHERE,
    evidence={"steps": [0], "step": 256, "then": [{"step": 0, "op": "x"}], "listed": ["blocks.step 3"], "tensors": 1},
)
REPORT = Report(
    command="bisect-nan",
    target={"path": "step 0", "step": 7},
    verdict="sick",
    run={"steps": 1, "step": 0, "notes": ["step 0 ran in fp32"]},
    findings=(FINDING,),
    checks=(Check(name="finite", result="found at step 0", headroom={"step": 0, "steps": 1}),),
    skipped=(Skipped(what="steps after step 0", reason="step 0 has left NaN"),),
    errors=(ErrorNote(what="step 0", kind="user_code", message="ValueError: loss is NaN at step 31000"),),
)


def test_sentences_and_numbers_are_counted_and_the_users_text_is_not():
    report = renumber_steps(REPORT, 31000)
    (finding,) = report.findings
    assert finding.message == ("At step 31000 the module blocks.3 overflows; the loop said: loss is NaN at step 31000.")
    assert finding.where == replace(WHERE, step=31000)
    assert finding.evidence == {
        "steps": [31000],
        "step": 256,
        "then": [{"step": 31000, "op": "x"}],
        "listed": ["blocks.step 3"],
        "tensors": 1,
    }
    assert report.target == REPORT.target
    assert report.run == {"steps": 1, "step": 31000, "notes": ["step 31000 ran in fp32"]}
    assert (report.checks[0].result, report.checks[0].headroom) == ("found at step 31000", {"step": 31000, "steps": 1})
    assert (report.skipped[0].what, report.skipped[0].reason) == ("steps after step 31000", "step 31000 has left NaN")
    assert report.errors[0].message == "ValueError: loss is NaN at step 31000"


def test_the_text_of_an_exception_is_the_users():
    raised = "step 0, replayed in fp32, raised ValueError: bad batch at step 0; step 0 is left out"
    report = renumber_steps(replace(REPORT, errors=(ErrorNote(what="x", kind="user_code", message=raised),)), 31000)
    assert report.errors[0].message == (
        "step 31000, replayed in fp32, raised ValueError: bad batch at step 0; step 31000 is left out"
    )
    assert renumber_steps(REPORT, 0) is REPORT
