"""A label that another torch moves is not asked for there; and CI asks for half of the slow variants of a case."""

from __future__ import annotations

import pytest

from fixtures.corpus import runs

CASES = runs.case_ids()
NOT_HERE = {case for case in runs.case_ids() if not runs.holds_here(case)}


def pytest_collection_modifyitems(items):
    changes = sorted({item.originalname for item in items if item.path.name == "test_variants.py"})
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        varied = case and item.originalname in changes and item.get_closest_marker("slow")
        if varied and (changes.index(item.originalname) + CASES.index(case)) % 2:
            item.add_marker(pytest.mark.thorough)
        if case in NOT_HERE:
            reason = f"the label of {case} holds for {runs.label(case)['holds']}"
            item.add_marker(pytest.mark.skip(reason=reason))
