"""A report that the schema accepts can be shown in every form, whoever wrote it."""

from __future__ import annotations

import copy

import pytest

from ampdoctor.errors import ReportError
from ampdoctor.reports.json_report import report_as_dict
from ampdoctor.reports.read_json import report_from_dict
from tests.reports.every_field import every_field
from tests.reports.full_sample import full
from tests.reports.test_hostile_names import FORMATS, rendered
from tests.samples import EVERY

OUT = object()


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def with_less(report, less):
    """Yield the report with one part after the other taken out, or replaced by less, where the schema allows it."""
    for path in places(report):
        if not path:
            continue
        copied = copy.deepcopy(report)
        parent = copied
        for key in path[:-1]:
            parent = parent[key]
        if less is OUT:
            del parent[path[-1]]
        else:
            parent[path[-1]] = less
        try:
            read = report_from_dict(copied)
        except ReportError:
            continue
        yield path, read


def assert_all_are_shown(reports):
    shown = 0
    for path, report in reports:
        for form in FORMATS:
            try:
                rendered(form, report)
            except Exception as error:
                raise AssertionError(f"{form} without {path}") from error
        shown += 1
    assert shown


CONTAINED = {"sick", "warned"}  # in the full sample
SAMPLES = {name: report_as_dict(report) for name, report in {**EVERY, "full": full()}.items() if name not in CONTAINED}
SAMPLES |= {"every field": every_field(command="recommend")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_schema_does_not_require_may_be_missing_in_every_form(name):
    assert_all_are_shown(with_less(SAMPLES[name], OUT))


@pytest.mark.slow
@pytest.mark.parametrize("less", [None, [], {}, "", 0, -1, "NaN"], ids=repr)
def test_what_the_schema_allows_to_be_less_is_shown_in_every_form(less):
    assert_all_are_shown(with_less(SAMPLES["every field"], less))
