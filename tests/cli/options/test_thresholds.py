"""`--threshold`, and what pages and reports say of them."""

from __future__ import annotations

import json

import pytest

from ampdoctor.cli.main import main
from ampdoctor.cli.options import parse_thresholds
from ampdoctor.diagnosis.catalogue import all_thresholds, thresholds_from
from ampdoctor.errors import UsageError
from tests.samples import HEALTHY

MOVED = thresholds_from({"AMP107": {"saturated": 0.1}, "AMP301": {"flushed": 0.25}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("saturated=0.1", "the form is NAME=VALUE, and the names are jobs=none, exact=false and those of the rules"),
        ("exact", "the form is NAME=VALUE"),
        ("exact=perhaps", "--threshold exact=perhaps: "),
        ("jobs=0", "--threshold jobs=0: Input should be greater than or equal to 1"),
        ("AMP107.saturated=many", "'many' is no number"),
        ("AMP107.saturated=0.\u096b", "is no number"),
        ("AMP115.checkpoints=1_0", "'1_0' is no number"),
        ("jobs=1_0", "'1_0' is no number"),
        ("AMP107.saturated=nan", "AMP107.saturated is nan, not between 0 and 1"),
        ("AMP107.satiated=0.1", "AMP107 has no threshold 'satiated'; it has saturated (default 0.0625)"),
        ("AMP999.x=1", "AMP999 is no rule with a threshold"),
    ],
)
def test_another_form_is_refused_in_a_sentence_by_each_command(given, words, capsys):
    assert main(["scan", "nothing.pt", "--threshold", given]) == 2
    assert words in capsys.readouterr().err


def test_a_knob_is_set_on_the_command_line_in_the_environment_and_in_a_file(tmp_path, monkeypatch, stub_workflow):
    seen = []
    stub_workflow("bisect_nan", lambda request, **_: seen.append(request.half_products) or HEALTHY)
    monkeypatch.chdir(tmp_path)
    plain = ("--threshold", "half-products=plain")
    assert main(["bisect-nan", "a.py:f", *plain]) == 0
    monkeypatch.setenv("AMPDOCTOR_HALF_PRODUCTS", "plain")
    assert main(["bisect-nan", "a.py:f"]) == main(["bisect-nan", "a.py:f", "--threshold", "half-products=fp32"]) == 0
    monkeypatch.delenv("AMPDOCTOR_HALF_PRODUCTS")
    (tmp_path / "ampdoctor.toml").write_text('threshold = ["half-products=plain"]')
    assert main(["bisect-nan", "a.py:f"]) == 0
    assert seen == ["plain", "plain", "fp32", "plain"]
    assert main(["bisect-nan", "a.py:f", *plain, *plain]) == 2


def test_one_is_given_once():
    with pytest.raises(UsageError, match=r"--threshold AMP107\.saturated: given twice"):
        parse_thresholds(["AMP107.saturated=0.1", "AMP107.saturated=0.1"])


@pytest.fixture
def configured(tmp_path, monkeypatch, stub_workflow):
    """Return a function that runs `profile` beside a configuration file; the thresholds that its workflow gets."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        seen = []
        (tmp_path / "ampdoctor.toml").write_text(text)
        stub_workflow("profile", lambda request, **_: seen.append(request.thresholds) or HEALTHY)
        return main(["profile", "a.py:f", *arguments]), *seen

    return run


FILE = """
[rules.AMP301]
flushed = 0.5
severity = "note"
[rules.saturated-values]
saturated = 0.1
"""


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(configured, monkeypatch):
    monkeypatch.setenv("AMPDOCTOR_THRESHOLD", "AMP301.flushed=0.25")
    by_environment = {"AMP301": {"flushed": 0.25}, "AMP107": {"saturated": 0.1}}
    assert configured(FILE) == (0, thresholds_from(by_environment))
    typed = {"AMP301": {"flushed": 0.125}, "AMP107": {"saturated": 0.2}}
    options = ["--threshold", "AMP301.flushed=0.125", "--threshold", "AMP107.saturated=0.2"]
    assert configured(FILE, *options) == (0, thresholds_from(typed))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[rules.AMP107]\nsatiated = 0.1",
            "rules.AMP107.satiated: AMP107 has no threshold 'satiated'; it has saturated (default 0.0625)",
        ),
        ("[rules.AMP107]\nsaturated = 3", "rules.AMP107.saturated: AMP107.saturated is 3, not between 0 and 1 (share)"),
        ("[rules.AMP107]\nsevrity = 'note'", "rules.AMP107.sevrity: AMP107 has no threshold 'sevrity'"),
        ("[rules.AMP107]\nsaturated = 'much'", "AMP107.saturated is 'much', which is no number"),
        ("[rules.AMP101]\ncount = 3", "rules.AMP101.count: AMP101 is no rule with a threshold that can be moved"),
        ("[rules.AMP702]\nentries = 2.5", "rules.AMP702.entries: AMP702.entries is 2.5, not a whole number"),
    ],
)
def test_what_a_file_says_wrongly_is_told_with_its_place(configured, text, words, capsys):
    assert configured(text) == (2,)
    told = capsys.readouterr().err
    assert words in told
    assert "ampdoctor.toml" in told


GIVEN = ["--threshold", "AMP107.saturated=0.1", "--threshold", "AMP301.flushed=0.25"]


@pytest.mark.parametrize(
    ("arguments", "workflow", "function"),
    [
        (["scan", "a.pt"], "scan", "scan"),
        (["scan", "a.pt", "--against", "b.pt"], "scan_against", "compare"),
        (["bisect-nan", "a.py:f"], "bisect_nan", "bisect_nan"),
        (["profile", "a.py:f"], "profile", "profile"),
        (["recommend", "a.py:f"], "recommend", "recommend"),
        (["recommend", "a.safetensors"], "recommend", "recommend_from_file"),
    ],
    ids=" ".join,
)
def test_each_command_hands_them_to_its_workflow(arguments, workflow, function, stub_workflow, monkeypatch):
    seen = []

    def note(*given, thresholds=None, **_):
        request = next((one for one in given if hasattr(one, "thresholds")), None)
        seen.append(thresholds if request is None else request.thresholds)
        return HEALTHY

    stub_workflow(workflow, None)
    import sys

    monkeypatch.setattr(sys.modules[f"ampdoctor.workflows.{workflow}"], function, note, raising=False)
    assert main([*arguments, *GIVEN]) == 0
    assert seen == [MOVED]


def test_a_page_shows_what_may_be_moved(capsys):
    assert main(["rule", "AMP301"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "AMP301.flushed = 0.001 (share, 0 to 1): Share of nonzero gradient elements" in text
    assert main(["rule", "AMP301", "--format", "json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)
    assert page["thresholds"][0] == {
        "name": "flushed",
        "default": 0.001,
        "unit": "share",
        "lowest": 0,
        "highest": 1,
        "why": all_thresholds()["AMP301.flushed"].why,
    }
