from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import jsonschema
import pytest

from ampdoctor.errors import ReportError
from ampdoctor.evidence.report import Check, Suppressed
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.reports.human import plain_text
from ampdoctor.reports.json_report import report_as_dict, schema
from ampdoctor.reports.read_json import report_from_dict, report_from_text
from tests.reports.every_field import places
from tests.reports.full_sample import full
from tests.samples import EVERY, HEALTHY, SICK, renderer

SAMPLES = {**EVERY, "full": full(), "full of a name": full("NaN"), "lone": full("\ud800\x00\u2028")}
FORMS = ("json", "jsonl", "markdown", "github", "junit", "sarif")


@pytest.mark.parametrize("form", ["json", "jsonl"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_report_that_is_read_back_is_the_one_that_was_written(name, form):
    report = SAMPLES[name]
    back = report_from_text(renderer(form)(report))
    assert report_as_dict(back) == report_as_dict(report)
    assert report_from_text(renderer(form)(back)) == back or name in ("full", "full of a name", "lone")  # NaN != NaN


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text is no JSON"),
        ('{"a": 1}', "no report of ampdoctor"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema_version": "3"}', "schema version 3; this version of ampdoctor reads 2"),
        ('{"schema_version": "2"}', "no report that this version reads: baseline is missing"),
        ('{"type": "report"}', "has been cut"),
        ('{"type": "report"}\n{"type":\n{"type": "summary"}', "line 2 is no JSON"),
        ('{"type": "report"}\n[]\n{"type": "summary"}', "line 2 is of no type"),
        ('{"type": "report"}\n{"type": "check"}\n{"type": "summary"}', "counts 0 checks, and 1 are there"),
    ],
)
def test_what_is_no_report_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(ReportError) as refused:
        report_from_text(text)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


SUPPRESSED = replace(
    SICK, findings=(), suppressed=tuple(Suppressed(finding=one, by="ignore", reason="known") for one in SICK.findings)
)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (replace(SICK, findings=()), "its verdict is sick, and no error was found"),
        (EVERY["warned"], None),
        (replace(EVERY["incomplete"], complete=True), "it is complete, and something could not be examined"),
        (replace(SICK, verdict="healthy"), "its verdict is healthy, and an error was found"),
        (replace(SUPPRESSED, verdict="healthy"), "its verdict is healthy, and an error was found"),
        (SUPPRESSED, None),
        (
            replace(HEALTHY, checks=(Check(name="finite weights", result="found"),)),
            "a check has found something, and no",
        ),
        (replace(SICK, findings=(), complete=False), None),  # a watched run that died where nobody looked
    ],
)
def test_a_report_that_contradicts_itself_is_refused(report, sentence):
    if sentence is None:
        assert report_from_dict(report_as_dict(report)).verdict == report.verdict
        return
    with pytest.raises(ReportError, match=f"contradicts itself: {sentence}"):
        report_from_dict(report_as_dict(report))


def put(data, path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


HISTOGRAM = ("profile", "sites", 0, "histogram")
NOTHING = Histogram.empty().to_dict()


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (HISTOGRAM, {**NOTHING, "bins": [3], "counts": [{}]}, "counts[0] is not of type integer"),
        (HISTOGRAM, {**NOTHING, "bins": [3], "counts": [-5]}, "counts[0] is -5, out of range"),
        (
            HISTOGRAM,
            {**NOTHING, "bins": [3], "counts": [1], "amax": "huge"},
            "amax is 'huge', which is not of the form",
        ),
        (("findings", 0, "code"), "AMP101\n", "code is 'AMP101\\n', which is not of the form"),
        (("verdict",), "unwell", "verdict is 'unwell', not one of sick"),
        (("findings",), [{}], "findings[0].also is missing"),
        (("scaler",), {"change": 1}, "scaler.before is missing"),
        (("target", "paths"), 3, "target.paths is not of type"),
        (("target", "paths"), [3], "target.paths[0] is not of type"),
        (("target", "members"), [{"name": "a"}], "target.members[0].step is missing"),
        (("target", "bytes"), "many", "target.bytes is not of type"),
        (("run", "notes"), [5], "run.notes[0] is not of type"),
    ],
)
def test_a_value_that_no_report_has_is_refused(path, value, sentence):
    data = report_as_dict(full())
    put(data, path, value)
    with pytest.raises(ReportError) as refused:
        report_from_dict(data)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("trend", "points", 0, "loss"), 10**300),
        (HISTOGRAM, {**NOTHING, "bins": [3], "counts": [1], "amax": "0x1.8p+1023", "amin": None, "min_spacing": "inf"}),
        (("profile", "loss_scale"), "NaN"),
    ],
)
def test_a_value_that_is_odd_is_rendered(path, value):
    data = report_as_dict(full())
    put(data, path, value)
    report = report_from_dict(data)
    assert plain_text(report, verbose=2)
    assert all(renderer(form)(report) for form in (*FORMS, "html"))


def damaged(report):
    """Yield the report with one part taken out or added to, or replaced by one of several values in turn."""
    others = itertools.cycle([None, "", -1.5, True, []])
    for path in places(report):
        if not path:
            continue
        for other in ["take out", "add to", next(others), next(others)]:
            copied = copy.deepcopy(report)
            parent = copied
            for key in path[:-1]:
                parent = parent[key]
            if other == "take out":
                del parent[path[-1]]
            elif other == "add to":
                if not isinstance(parent[path[-1]], dict):
                    continue
                parent[path[-1]]["extra"] = 1
            else:
                parent[path[-1]] = other
            yield path, other, copied


def is_read(report):
    try:
        report_from_dict(report)
    except ReportError as error:
        return "contradicts itself" in str(error)  # which no schema can say
    return True


@pytest.mark.slow
def test_what_the_schema_refuses_is_refused_and_nothing_else():
    sample = full()
    report = report_as_dict(
        replace(sample, findings=sample.findings[:1], suppressed=sample.suppressed[:1], checks=sample.checks[:1])
    )
    report["scaler"] = {**report["scaler"], "emit": None}
    validator = jsonschema.Draft202012Validator(schema())
    refused = 0
    for path, other, wrong in damaged(report):
        if path == ("schema_version",) or path[-1] == "verified":  # follows from the status, and is not read
            continue
        valid = validator.is_valid(wrong)
        refused += not valid
        assert is_read(wrong) == valid, (path, other)
    assert refused > 500


def test_a_mistake_far_inside_is_read_once():
    data = report_as_dict(full())
    finding = next(one for one in data["findings"] if one["prescription"])
    change = {**finding["prescription"], "status": "unwell"}
    for _ in range(40):  # read twice on each level, this would be a trillion readings
        change = {**finding["prescription"], "alternatives": [change]}
    finding["prescription"] = change
    with pytest.raises(ReportError, match=r"alternatives\[0\]\.status is 'unwell'"):
        report_from_dict(data)
