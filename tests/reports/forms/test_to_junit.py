from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ampdoctor.evidence.report import Check, Gate, Suppressed
from ampdoctor.reports.junit import render_junit
from tests.reports.full_sample import full
from tests.reports.hostile_names import NAMES
from tests.samples import EVERY, HEALTHY, INCOMPLETE, NOT_REPRODUCED, OVERFLOW, SICK, UNDERFLOW

XSD = Path(__file__).with_name("schemas") / "junit-10.xsd"
SAMPLES = {**EVERY, "full": full(), **{name: full(text) for name, text in NAMES.items()}}


@pytest.fixture(scope="module")
def jenkins():
    """What Jenkins accepts as a JUnit report."""
    etree = pytest.importorskip("lxml.etree", reason="the standard library reads no XSD")
    return etree, etree.XMLSchema(etree.parse(str(XSD)))


def cases(report):
    """Name to (class name, what it holds) of each test case."""
    root = ET.fromstring(render_junit(report))
    return {case.get("name"): (case.get("classname"), [child.tag for child in case]) for case in root.iter("testcase")}


@pytest.mark.parametrize("name", SAMPLES)
def test_it_is_what_jenkins_reads_and_counts_each_case_once(name, jenkins):
    etree, schema = jenkins
    text = render_junit(SAMPLES[name])
    schema.assertValid(etree.fromstring(text.encode()))
    root = ET.fromstring(text)
    suite = root.find("testsuite")
    found = {tag: len(root.findall(f".//testcase/{tag}")) for tag in ("failure", "error", "skipped")}
    assert {key: int(suite.get(key)) for key in ("failures", "errors", "skipped")} == {
        "failures": found["failure"],
        "errors": found["error"],
        "skipped": found["skipped"],
    }
    named = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(named) == int(suite.get("tests")) == len(set(named)) > 0


def test_a_rule_that_was_found_in_a_file_is_a_case_that_fails():
    found = cases(SICK)
    assert found["AMP201 forward-overflow"] == ("t5.py", ["failure"])
    assert found["AMP301 gradient-underflow"] == ("model.safetensors", ["failure"])
    assert found["finite loss"] == ("t5.py", [])
    assert "finite gradients" not in found  # the failed case of its rule stands for it
    assert found["left out: extra.bin"] == ("t5.py", ["skipped"])


def test_notes_pass_and_two_of_one_name_are_two_cases():
    noted = replace(HEALTHY, findings=(replace(UNDERFLOW, severity="note"),), skipped=SICK.skipped * 2)
    found = cases(noted)
    assert found["AMP301 gradient-underflow"] == ("model.safetensors", ["system-out"])
    assert {"left out: extra.bin", "left out: extra.bin (2)"} <= found.keys()


def test_findings_of_one_rule_in_one_file_are_one_case_with_all_of_them():
    other = replace(UNDERFLOW, message="and another", where=replace(UNDERFLOW.where, tensor="b"))
    root = ET.fromstring(render_junit(replace(SICK, findings=(UNDERFLOW, other))))
    (failure,) = root.iter("failure")
    assert failure.get("message").endswith("flush to zero (and 1 more)")
    assert "and another" in failure.text
    assert UNDERFLOW.fingerprint in failure.text


@pytest.mark.parametrize(
    ("fail_on", "results"),
    [
        ("error", ["failure", "system-out"]),
        ("warning", ["failure", "failure"]),
        ("never", ["system-out", "system-out"]),
    ],
)
def test_a_case_fails_where_the_gate_does(fail_on, results):
    found = cases(replace(SICK, gate=Gate(fail_on=fail_on, exit_zero=True)))
    assert [found[name][1] for name in ("AMP201 forward-overflow", "AMP301 gradient-underflow")] == [
        [result] for result in results
    ]


def test_what_did_not_run_or_is_suppressed_is_skipped():
    report = replace(
        HEALTHY,
        checks=(Check(name="finite loss", result="not_run"),),
        suppressed=(Suppressed(finding=OVERFLOW, by="ignore", reason="known since May"),),
    )
    text = render_junit(report)
    assert 'message="ignore: known since May"' in text
    assert cases(report)["finite loss"][1] == ["skipped"]
    assert cases(report)["AMP201 forward-overflow (suppressed: encoder.block.3.ff.wo)"] == ("t5.py", ["skipped"])


def test_what_was_not_examined_is_an_error_and_no_answer_is_one_too():
    assert cases(INCOMPLETE)["not examined: shard-2.safetensors"] == ("model.safetensors", ["error"])
    assert cases(INCOMPLETE)["verdict"][1] == ["error"]
    assert cases(NOT_REPRODUCED)["verdict"][1] == ["error"]
    assert cases(HEALTHY)["verdict"][1] == ["system-out"]
