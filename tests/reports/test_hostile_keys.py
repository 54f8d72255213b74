"""No key of a report that came from elsewhere acts in any form of it, or changes the exit code."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata

import pytest

from ampdoctor.cli.main import main
from ampdoctor.reports.read_json import report_from_dict
from tests.reports.every_field import SCHEMA, every_field
from tests.reports.hostile_names import NAMES
from tests.reports.test_hostile_names import FORMATS, commands_in, rendered, shape

COMMANDS = ("scan", "bisect-nan", "profile", "recommend")
PLAIN = "plain.key"


def open_objects(node):
    """Yield the parts of the schema that take keys which it does not name, but for those that name a role or option."""
    if isinstance(node, dict):
        if "object" in node.get("type", ()) and node.get("additionalProperties", True) and "propertyNames" not in node:
            yield node
        for inner in node.values():
            yield from open_objects(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from open_objects(inner)


def objects_with(value, key):
    """Yield the objects in a report that hold a key."""
    if isinstance(value, dict):
        if key in value:
            yield value
        for inner in value.values():
            yield from objects_with(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from objects_with(inner, key)


def test_every_object_that_takes_other_keys_has_one():
    assert len(list(objects_with(every_field(PLAIN), PLAIN))) >= len(list(open_objects(SCHEMA))) >= 20


PAIRS = [
    pytest.param(form, key, COMMANDS[(i + j) % len(COMMANDS)], id=f"{form}-{name}")
    for (i, form), (j, (name, key)) in itertools.product(enumerate(FORMATS), enumerate(NAMES.items()))
]
"""Every form with every key, and either of them with every command."""


@functools.cache
def usual(form, command):
    """The commands and the shape of a report without a hostile key."""
    text = rendered(form, report_from_dict(every_field(PLAIN, command=command)))
    return len(list(commands_in(text))), shape(form, text)


@pytest.mark.parametrize(("form", "key", "command"), PAIRS)
def test_nothing_in_a_key_acts(form, key, command):
    text = rendered(form, report_from_dict(every_field(key, command=command)))
    text.encode("utf-8")
    acting = {c for c in set(text) if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}
    assert acting <= {"\n"} | ({"\t", "\r"} if form == "html" else set())
    assert (len(list(commands_in(text))), shape(form, text)) == usual(form, command)


@pytest.mark.parametrize("key", [NAMES["surrogates"], NAMES["newlines"]], ids=["surrogates", "newlines"])
def test_the_exit_code_is_the_same_in_every_form(key, tmp_path, capsysbinary):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(every_field(key, complete=True, errors=[])))
    assert {form: main(["merge", str(file), "--format", form]) for form in FORMATS} == dict.fromkeys(FORMATS, 1)
    assert not capsysbinary.readouterr().err
