"""The baseline: what is known, what is new, what is fixed; and a ratchet without slack."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import BaselineSection, Finding, Report, Suppressed
from ampdoctor.gates.baseline import apply_baseline, baseline_of, from_text, refuse_other_command, to_text
from tests.samples import NOTHING_CHANGED

HEAD = '{"format": "ampdoctor-baseline", "version": "1", "command": "scan", "findings": '
PLACE = '"module": "", "op": null, "tensor": null, "file": null}]}'


def finding(tensor="w", severity="error", code="AMP101", **where):
    return Finding(
        code=code,
        name="n",
        severity=severity,
        message=f"{tensor} is sick",
        where=Where(phase="checkpoint", tensor=tensor, **where),
    )


def scanned(*findings, **fields):
    return Report(**{"command": "scan", "target": {}, "verdict": "sick", "findings": findings, **fields})


def against(known, now):
    return apply_baseline(now, baseline_of(known), "base.json")


def test_what_is_known_is_set_aside_and_what_is_new_stays():
    old, new = finding("old"), finding("new")
    report = against(scanned(old), scanned(old, new))
    assert report.findings == (new,)
    assert [(one.finding, one.by, one.reason) for one in report.suppressed] == [(old, "baseline", "base.json")]
    assert report.baseline == BaselineSection(file="base.json", written=False, new=1, known=1, fixed=())
    assert report.verdict == "sick"


def test_it_is_the_same_finding_in_another_step_with_other_numbers():
    report = against(scanned(finding(step=3)), scanned(replace(finding(step=9), message="now 4 % are NaN")))
    assert report.baseline.known == 1


def test_what_is_gone_is_listed_as_fixed():
    report = against(scanned(finding("gone"), finding("here")), scanned(finding("here")))
    (fixed,) = report.baseline.fixed
    assert (fixed.tensor, fixed.code, fixed.severity) == ("gone", "AMP101", "error")
    assert fixed.message


@pytest.mark.parametrize("by", ["ignore", "baseline"])
def test_what_something_else_has_set_aside_is_not_fixed(by):
    now = scanned(suppressed=(Suppressed(finding=finding(), by=by, reason="r"),))
    assert against(scanned(finding()), now).baseline.fixed == ()


def test_two_where_one_was_known_are_one_new():
    report = against(scanned(finding()), scanned(finding(step=1), finding(step=2)))
    assert (report.baseline.known, report.baseline.new) == (1, 1)
    assert len(report.findings) == len(report.suppressed) == 1


def test_one_that_is_worse_than_it_was_is_new_and_not_fixed():
    report = against(scanned(finding(severity="warning")), scanned(finding(severity="error")))
    assert report.baseline == BaselineSection(file="base.json", written=False, new=1, known=0, fixed=())


@pytest.mark.parametrize("severities", [("error", "warning"), ("warning", "error")])
def test_of_several_the_worst_takes_the_worst_entry(severities):
    known = scanned(*(finding(severity=s) for s in ("warning", "error")))
    assert against(known, scanned(*(finding(severity=s) for s in severities))).findings == ()


def about(*tensors, severity="error", file=None):
    """A finding about many tensors, the first of which shows it best."""
    first, *others = (Where(phase="checkpoint", tensor=tensor, file=file) for tensor in tensors)
    return replace(finding(severity=severity), where=first, also=tuple(others))


@pytest.mark.parametrize("known", [about("a", "b", "c"), about("c", "a", "b")])
@pytest.mark.parametrize("now", [about("a", "b", "c"), about("b", "c", "a"), about("b", "c"), finding("a")])
def test_a_finding_about_many_is_known_whichever_is_the_worst_and_where_one_is_mended(known, now):
    report = against(scanned(known), scanned(now))
    assert (report.findings, report.baseline.known) == ((), 1)
    mended = {where.tensor for where in known.places} - {where.tensor for where in now.places}
    assert {entry.tensor for entry in report.baseline.fixed} == mended


@pytest.mark.parametrize("known", [[about("a", "b")], [finding("a"), finding("b")], [finding("a"), about("b", "x")]])
def test_a_finding_about_one_more_than_was_known_is_new(known):
    now = about("a", "b", "c")
    report = against(scanned(*known), scanned(now))
    assert report.findings == (now,)
    assert {entry.tensor for entry in report.baseline.fixed} <= {"x"}, "what it is about is still there"


SEVERAL = {"path": "2 paths", "paths": ["x/m.pt", "y"], "files": [{"path": "x/m.pt"}, {"path": "y/n.pt"}]}


def test_of_several_checkpoints_a_finding_is_known_in_its_own_file():
    first, second = finding(file="x/m.pt"), finding(file="y/n.pt")
    known = scanned(first, target=SEVERAL)
    report = against(known, scanned(second, target=SEVERAL))
    assert report.findings == (second,)
    assert [entry.file for entry in report.baseline.fixed] == ["x/m.pt"]
    assert against(known, scanned(first, target=SEVERAL)).findings == ()


def test_what_one_finding_could_not_use_is_there_for_the_next():
    report = against(scanned(finding("a"), finding("b")), scanned(about("a", "b", "c"), finding("b")))
    assert [f.where.tensor for f in report.findings] == ["a"]


def test_of_a_checkpoint_that_was_not_examined_nothing_is_fixed():
    known = scanned(finding(file="x/m.pt"), finding("v", file="y/n.pt"), target=SEVERAL)
    alone = {"path": "m.pt", "location": "x/m.pt"}
    report = against(known, scanned(finding(file="m.pt"), target=alone))
    assert (report.findings, report.baseline.fixed) == ((), ())
    report = against(known, scanned(target=alone))
    assert [entry.file for entry in report.baseline.fixed] == ["x/m.pt"]


def test_what_a_baseline_has_set_aside_is_in_the_next_one_and_what_an_ignore_has_is_not():
    aside = [Suppressed(finding=finding(by), by=by, reason="r") for by in ("baseline", "ignore")]
    made = baseline_of(scanned(finding("new"), suppressed=tuple(aside)))
    assert {entry.tensor for entry in made.entries} == {"new", "baseline"}


def test_the_file_is_sorted_strict_json_that_reads_back():
    report = scanned(finding("b"), finding("a\u202e\x1b"), finding("c", op="aten.linear", module="m"))
    text = to_text(baseline_of(report))
    assert text == to_text(baseline_of(replace(report, findings=report.findings[::-1])))
    assert text.isascii()
    assert from_text(text, "f") == baseline_of(report)
    read = json.loads(text)
    assert [entry["tensor"] for entry in read["findings"]] == ["a\u202e\x1b", "b", "c"]
    assert (read["command"], read["tool"]["name"]) == ("scan", "ampdoctor")
    assert "sick" not in text, "a message has numbers, and they change"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "[]",
        '{"schema_version": "2", "findings": []}',
        HEAD.replace('"1"', '"7"') + "[]}",
        '{"format": "ampdoctor-baseline", "version": "1", "command": "scan"}',
        HEAD.replace('"scan"', "3") + "[]}",
        HEAD + '[{"fingerprint": "a", "code": "AMP101", "severity": "fatal", ' + PLACE,
        HEAD + '[{"fingerprint": 1, "code": "AMP101", "severity": "error", ' + PLACE,
    ],
)
def test_what_is_no_baseline_is_refused_with_a_sentence(text):
    with pytest.raises(UsageError, match=r"f\.json is no baseline that .* --write-baseline f\.json makes one"):
        from_text(text, "f.json")


def test_a_baseline_of_another_command_is_refused():
    known = baseline_of(scanned())
    with pytest.raises(UsageError, match="bisect-nan"):
        apply_baseline(scanned(command="bisect-nan"), known, "f")
    with pytest.raises(UsageError, match="bisect-nan"):
        refuse_other_command(known, "bisect-nan", "f")
    refuse_other_command(known, "scan", "f")


def test_a_comparison_of_two_checkpoints_has_a_baseline_of_its_own():
    compared = scanned(finding(), change=NOTHING_CHANGED)
    with pytest.raises(UsageError, match="--against"):
        apply_baseline(compared, baseline_of(scanned()), "f")
    assert apply_baseline(compared, baseline_of(compared), "f").findings == ()
    refuse_other_command(baseline_of(compared), "scan", "f")


@pytest.mark.parametrize("fields", [{"complete": False}, {"verdict": "not_judged"}])
def test_what_was_not_examined_makes_no_baseline(fields):
    with pytest.raises(UsageError, match="no baseline was written"):
        baseline_of(scanned(finding(), **fields))
    assert against(scanned(finding()), scanned(**fields)).baseline.fixed == ()
