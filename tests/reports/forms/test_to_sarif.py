from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote_to_bytes, urlsplit

import jsonschema
import pytest

from ampdoctor.evidence.location import Source
from ampdoctor.reports import sarif
from ampdoctor.reports.sarif import render_sarif
from tests.reports.full_sample import full
from tests.reports.hostile_names import NAMES
from tests.samples import EVERY, HEALTHY, INCOMPLETE, NOT_REPRODUCED, OVERFLOW, SICK, UNDERFLOW

SCHEMA = json.loads((Path(__file__).with_name("schemas") / "sarif-2.1.0.json").read_text())
SAMPLES = {**EVERY, "full": full(), **{name: full(text) for name, text in NAMES.items()}}


@pytest.fixture(scope="module")
def validator():
    return jsonschema.Draft4Validator(SCHEMA, format_checker=jsonschema.FormatChecker())


def run_of(report):
    (run,) = json.loads(render_sarif(report))["runs"]
    return run


def place_of(report, result=0):
    artifact = run_of(report)["results"][result]["locations"][0]["physicalLocation"]["artifactLocation"]
    return artifact["uri"], artifact["uriBaseId"]


@pytest.mark.parametrize("name", [*EVERY, "full", "surrogates", "mentions"])
def test_it_follows_the_official_schema(name, validator):
    validator.validate(json.loads(render_sarif(SAMPLES[name])))


@pytest.mark.parametrize("name", SAMPLES)
def test_github_takes_every_result(name):
    """Its rules beyond the schema: docs.github.com, "SARIF support for code scanning"."""
    run = run_of(SAMPLES[name])
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    for rule in rules.values():
        assert rule["help"]["text"]
        assert len(rule["fullDescription"]["text"]) <= 1024
        assert len(rule["properties"]["tags"]) <= 20
        assert rule["properties"]["problem.severity"] in ("error", "warning", "recommendation")
    for result in run["results"]:
        assert result["message"]["text"]
        assert result["partialFingerprints"]["primaryLocationLineHash"]
        assert result["ruleId"] in rules
        for location in result["locations"]:
            place = location["physicalLocation"]
            uri = place["artifactLocation"]["uri"]
            assert uri
            assert uri.isascii()
            assert not urlsplit(uri).scheme
            assert not uri.startswith("/")
            assert "\\" not in uri
            assert place["region"]["startLine"] >= 1
    assert len(run["results"]) <= 25_000


def test_the_place_is_the_source_line_or_the_checkpoint_and_its_tensor():
    first, second = run_of(SICK)["results"]
    assert first["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "t5.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 41},
    }
    assert first["locations"][0]["logicalLocations"] == [
        {"kind": "module", "name": "wo", "fullyQualifiedName": "encoder.block.3.ff.wo"}
    ]
    assert second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "model.safetensors"
    assert second["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
    assert second["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "blocks.0.fc.weight"
    assert (first["level"], second["level"]) == ("error", "warning")
    assert first["partialFingerprints"]["ampdoctor/v1"] == OVERFLOW.fingerprint


@pytest.mark.parametrize(
    ("target", "file", "uri"),
    [
        ({"path": "ckpt", "location": "runs/a b/ckpt"}, "model.safetensors", "runs/a%20b/ckpt/model.safetensors"),
        ({"path": "m.pt", "location": "runs/m.pt"}, "m.pt", "runs/m.pt"),
        ({"path": "i.json", "location": "runs/i.json"}, "shard-1.safetensors", "runs/shard-1.safetensors"),
        ({"path": "gewichte.pt"}, "gewichte-é#?%.pt", "gewichte.pt/gewichte-%C3%A9%23%3F%25.pt"),
        ({"factory": "package.module:make"}, None, "package/module.py"),
        ({"path": "2 paths", "paths": ["a", "b"]}, "a/m.pt", "a/m.pt"),
        ({"profile": "ranges.npz", "factory": "t5.py:make"}, None, "ranges.npz"),
    ],
)
def test_the_file_is_relative_to_the_working_directory(target, file, uri):
    finding = replace(UNDERFLOW, where=replace(UNDERFLOW.where, file=file))
    assert place_of(replace(SICK, target=target, findings=(finding,))) == (uri, "%SRCROOT%")


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("t5.py", ("a%20b/t5.py", "%SRCROOT%")),
        ("../src/t5.py", ("src/t5.py", "%SRCROOT%")),
        ("/repo/src/t5.py", ("src/t5.py", "%SRCROOT%")),
        ("/srv/t5.py", ("srv/t5.py", "ROOT")),
    ],
)
def test_a_file_below_a_known_root_is_relative_to_it(file, place):
    target = {**SICK.target, "repository": {"root": "/repo", "folder": "a b"}}
    finding = replace(OVERFLOW, where=replace(OVERFLOW.where, source=Source(file, 3)))
    assert place_of(replace(SICK, target=target, findings=(finding,))) == place


def test_suppressed_findings_and_the_baseline_have_sarifs_own_words():
    results = run_of(full())["results"]
    assert [result.get("baselineState") for result in results] == ["new"] * 3 + [None, "unchanged"]
    ignored, known = results[3:]  # what is fixed has no result: GitHub would show it as open
    assert ignored["suppressions"][0]["justification"].endswith("is known")
    assert known["suppressions"][0]["status"] == "accepted"
    assert all("suppressions" not in result for result in results[:3])
    assert all("baselineState" not in result for result in run_of(SICK)["results"])


def test_an_incomplete_report_is_a_failed_execution():
    (invocation,) = run_of(INCOMPLETE)["invocations"]
    assert invocation["executionSuccessful"] is False
    first = invocation["toolExecutionNotifications"][0]
    assert first["level"] == "error"
    assert first["message"]["text"] == "shard-2.safetensors (truncated): the file ends early"
    (invocation,) = run_of(NOT_REPRODUCED)["invocations"]
    assert (invocation["executionSuccessful"], invocation["toolExecutionNotifications"][0]["level"]) == (
        True,
        "warning",
    )
    assert run_of(HEALTHY)["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_the_least_severe_results_give_way_to_the_limits(monkeypatch):
    findings = tuple(
        replace(UNDERFLOW, where=replace(UNDERFLOW.where, tensor=f"{index:x}" * 9)) for index in range(2000)
    )
    monkeypatch.setattr(sarif, "MAX_RESULTS", 1500)
    run = run_of(replace(SICK, findings=(OVERFLOW, *findings)))
    assert len(run["results"]) == 1500
    assert run["results"][0]["ruleId"] == "AMP201"
    assert run["invocations"][0]["toolExecutionNotifications"][-1]["message"]["text"].startswith("501 results left out")


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_the_uri_decodes_to_the_path_of_the_file(name):
    uri, _ = place_of(full(name), 1)
    path = str(PurePosixPath(name))
    assert unquote_to_bytes(uri) == path.encode("utf-8", "surrogatepass")
