"""A report that the schema accepts can be shown in every form, whoever wrote it."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict

import pytest

from ampdoctor.errors import ReportError
from ampdoctor.reports.json_report import report_as_dict
from ampdoctor.reports.read_json import report_from_dict
from tests.reports.every_field import every_field, places
from tests.reports.full_sample import full
from tests.reports.test_hostile_names import FORMATS, rendered
from tests.samples import EVERY

OUT = object()


def read(report, paths, less):
    """Read the report with these parts taken out, or replaced by less; None where the schema refuses that."""
    copied = copy.deepcopy(report)
    for *above, last in paths:
        parent = copied
        for key in above:
            parent = parent[key]
        if less is OUT:
            del parent[last]
        else:
            parent[last] = less
    try:
        return report_from_dict(copied)
    except ReportError:
        return None


def sparing(report, less):
    """Lists of parts that the schema lets be less, each list in one report: at one depth, and none beside another."""
    together, beside = defaultdict(list), Counter()
    for path in places(report):
        if path and read(report, [path], less) is not None:
            together[len(path), beside[path[:-1]]].append(path)
            beside[path[:-1]] += 1
    return list(together.values())


def assert_all_are_shown(report, less):
    spared = sparing(report, less)
    assert spared
    for paths in spared:
        for form in FORMATS:
            try:
                rendered(form, read(report, paths, less))
            except Exception as error:
                raise AssertionError(f"{form} without {paths}") from error


CONTAINED = {"sick", "warned"}  # in the full sample
SAMPLES = {name: report_as_dict(report) for name, report in {**EVERY, "full": full()}.items() if name not in CONTAINED}
SAMPLES |= {"every field": every_field(command="recommend")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_schema_does_not_require_may_be_missing_in_every_form(name):
    assert_all_are_shown(SAMPLES[name], OUT)


@pytest.mark.slow
@pytest.mark.parametrize("less", [None, [], {}, "", 0, -1, "NaN"], ids=repr)
def test_what_the_schema_allows_to_be_less_is_shown_in_every_form(less):
    assert_all_are_shown(SAMPLES["every field"], less)
