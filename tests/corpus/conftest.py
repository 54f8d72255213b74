"""A label that another torch moves is not asked for there; and of the changes of a case CI asks for one."""

from __future__ import annotations

import pytest

from fixtures.corpus import runs
from tests.corpus.reports import sort_of
from tests.pairwise import keep_each_value_once

NOT_HERE = {case for case in runs.case_ids() if not runs.holds_here(case)}


def pytest_collection_modifyitems(items):
    changed = [item for item in items if item.path.name == "test_variants.py" and item.get_closest_marker("slow")]
    keep_each_value_once(changed, _change_and_sort)
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if case in NOT_HERE:
            reason = f"the label of {case} holds for {runs.label(case)['holds']}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _change_and_sort(item):
    """Each sort of case in one change or another; and each change of each kind of cause."""
    case, policy = item.callspec.params["case"], item.callspec.params.get("policy", "cuda")
    return {sort_of(case), (item.originalname, runs.label(case)["phase"]), policy}
