from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from ampdoctor.evidence.report import Gate
from tests.samples import EVERY, HEALTHY, SICK, renderer

GATE = Gate(fail_on="error", exit_zero=False)
CODES = {"sick": 1, "healthy": 0, "incomplete": 2, "warned": 0, "not_reproduced": 2}


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a report to a file and gives its name."""

    def write(report, form="json"):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.{form}"
        file.write_text(renderer(form)(report))
        return str(file)

    return write


@pytest.mark.parametrize("form", ["json", "jsonl"])
@pytest.mark.parametrize("name", EVERY)
def test_one_report_is_shown_again_with_the_same_exit_code(name, form, written, typed):
    result = typed("merge", written(EVERY[name], form), "--format", "json")
    assert result.returncode == CODES[name]
    gated = replace(EVERY[name], gate=GATE)
    assert result.stdout == renderer("json")(gated)


def test_several_become_one(written, typed, check_report):
    files = [written(HEALTHY), written(EVERY["incomplete"], "jsonl")]
    result = typed("merge", *files, "--format", "json")
    assert result.returncode == 2
    assert "incomplete: 1 part could not be examined" in result.stderr
    assert check_report(result.stdout)["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"{}", "no report of ampdoctor: it has no schema_version"),
        (b'{"schema_version": "9"}', "a report of schema version 9; this version of ampdoctor reads 2"),
        (renderer("jsonl")(SICK).encode()[:-100], "the report has been cut"),
        (renderer("json")(SICK).encode()[:-100], "is no JSON"),
        (json.dumps({**json.loads(renderer("json")(SICK)), "verdict": 3}).encode(), "verdict is 3, not one of sick"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_no_report_is_one_sentence_and_exits_2(content, sentence, tmp_path, typed):
    file = tmp_path / "r.json"
    if content is not None:
        file.write_bytes(content)
    result = typed("merge", str(file))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ampdoctor: error: ")
    assert sentence in result.stderr
    assert str(file) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_merging_does_not_import_torch(written, run_cli):
    script = "import sys; from ampdoctor.cli.main import main; sys.exit(main(sys.argv[1:]) + ('torch' in sys.modules))"
    result = run_cli("merge", written(HEALTHY), command=(sys.executable, "-c", script))
    assert result.returncode == 0
