"""Which variants of a test CI asks for: each value of each parameter once; `make thorough` asks for the rest as well.

`@pytest.mark.each_value_once` stands over the parametrizations of a test, however many there are: three formats under
two policies are three variants, not six. Where the values of a variant are not its parameters, a function in the mark
says what they are: `each_value_once(of=lambda case, policy: {kind(case), policy})`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

THOROUGH = (pytest.mark.slow, pytest.mark.thorough)
"""Marks of a variant that another test asks for as well."""


def covering(rows, given=frozenset()):
    """Indices of the rows that, with what is given, have each value of all rows: by turns the one with the most new."""
    missing = set().union(*rows) - given
    left, kept = dict(enumerate(rows)), set()
    while missing:
        best = max(left, key=lambda index: (len(left[index] & missing), -index))
        missing -= left.pop(best)
        kept.add(best)
    return kept


def keep_each_value_once(items, values):
    """Leave to `make thorough` the variants whose values others have: of the slow ones, or of all if none is slow."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    among = [item for item in items if item.get_closest_marker("slow")] or items
    given = frozenset().union(*map(values, quick)) if among is not items else frozenset()
    # by a number that looks drawn, and is the same each time: what is kept is then spread over long parameters
    among = sorted(among, key=lambda item: zlib.crc32(item.nodeid.encode()))
    kept = covering([frozenset(values(item)) for item in among], given)
    for index, item in enumerate(among):
        if index not in kept:
            for mark in THOROUGH:
                item.add_marker(mark)


def leave_the_rest_to_thorough(items):
    """What `each_value_once` asks for."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_value_once") and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for variants in tests.values():
        given = variants[0].get_closest_marker("each_value_once").kwargs
        keep_each_value_once(variants, lambda item, given=given: _values(item.callspec.params, **given))


def _values(params, of=None):
    return of(**params) if of else {(name, repr(value)) for name, value in params.items()}
