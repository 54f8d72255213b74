"""A label that another torch moves is not asked for there."""

from __future__ import annotations

import pytest

from fixtures.corpus import runs

NOT_HERE = {case for case in runs.case_ids() if not runs.holds_here(case)}


def pytest_collection_modifyitems(items):
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if case in NOT_HERE:
            reason = f"the label of {case} holds for {runs.label(case)['holds']}"
            item.add_marker(pytest.mark.skip(reason=reason))
