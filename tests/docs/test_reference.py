"""The pages that are made from the code, and those that draw a picture of it."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest
import torch
from safetensors.torch import save_file

import ampdoctor
from ampdoctor.cli.main import main
from ampdoctor.evidence import report as report_module
from ampdoctor.evidence.log_records import KINDS, Stamp
from ampdoctor.reports.json_report import schema
from docs._ext import schema_page
from tests.docs.pages import DOCS
from tests.test_architecture import DIRECT

PYTHON = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")


def test_every_public_name_is_on_the_page_of_the_python_interface():
    documented = set(re.findall(r"^\.\. auto\w+:: ampdoctor\.(\w+)$", PYTHON, re.MULTILINE))
    assert documented == (set(ampdoctor.__all__) - {"__version__"}) | {"errors"}


def test_every_part_of_a_report_is_on_the_page_of_the_python_interface():
    own = (value for name, value in vars(report_module).items() if is_dataclass(value) and not name.startswith("_"))
    parts = {part.__name__ for part in own if part.__module__ == report_module.__name__}
    assert parts <= set(re.findall(r"^\.\. autoclass:: (\w+)$", PYTHON, re.MULTILINE))


@pytest.mark.parametrize("name", sorted(set(ampdoctor.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring_with_its_arguments(name):
    text = getattr(ampdoctor, name).__doc__
    assert "Args:" in text or "Attributes:" in text


def test_the_house_on_the_page_of_the_design_is_the_one_that_a_test_holds():
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", text, re.MULTILINE)
    assert {room: set(re.findall(r"`(\w+)`", below)) for room, below in rows} == DIRECT


def test_every_field_and_part_of_the_schema_is_on_the_page_of_the_report():
    page = schema_page.rendered(schema())
    for name, part in {"the-report": schema(), **schema()["$defs"]}.items():
        section = page.partition(f"(report-{name})=")[2].partition("\n(report-")[0]
        assert section, name
        for field in part.get("properties", {}):
            assert f"| `{field}` |" in section


def properties(part, path=""):
    """Yield every field of a schema with its path, however deep; what `if` and its branches repeat left aside."""
    if isinstance(part, dict):
        for name, field in part.get("properties", {}).items():
            yield f"{path}/{name}", field
        for key, inner in part.items():
            if key not in {"if", "then", "else"}:
                yield from properties(inner, f"{path}/{key}")
    elif isinstance(part, list):
        for index, inner in enumerate(part):
            yield from properties(inner, f"{path}/{index}")


def test_every_field_of_the_schema_says_what_it_is():
    found = dict(properties(schema()))
    assert len(found) > 300
    assert [path for path, field in found.items() if not field.get("description")] == []


def test_what_a_target_holds_is_in_the_schema(check_report, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (100, 200):
        save_file({"fc.weight": torch.full((2, 2), float(step))}, f"step-{step}.safetensors")
    parts = schema()["$defs"]
    for arguments in (
        ["."],
        ["step-100.safetensors", "step-200.safetensors"],
        [".", "--list"],
        ["step-200.safetensors", "--against", "step-100.safetensors"],
    ):
        assert main(["scan", *arguments, "--format", "json"]) in (0, 1)
        target = check_report(capsys.readouterr().out)["target"]
        assert target.keys() <= parts["target"]["properties"].keys()
        for member in target.get("members", ()):
            assert member.keys() <= parts["target_member"]["properties"].keys()


def test_every_kind_of_line_and_its_fields_are_on_the_page_of_the_log():
    source = [(DOCS / "log.md").read_text(encoding="utf-8")]
    schema_page.fill(None, "log", source)
    assert schema_page.LOG_MARKER not in source[0]
    for kind, record in KINDS.items():
        section = source[0].partition(f"(report-{kind}_line)=")[2].partition("\n(report-")[0]
        for field in (*fields(record), *fields(Stamp)):
            assert f"| `{field.name}` |" in section, kind
    assert set(re.findall(r"\(#report-(\w+)\)", source[0])) <= {
        *re.findall(r"\(report-(\w+)\)=", source[0]),
        *schema()["$defs"],
    }
