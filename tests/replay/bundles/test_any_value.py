"""Whatever stands in a manifest, a bundle is read or refused in a sentence."""

from __future__ import annotations

import copy
import json
import traceback

import pytest

from ampdoctor.errors import AmpdoctorError
from tests.replay.bundles.steps import load_bundle

WRONG = (None, True, -1, 2**70, 1.5, "", "x\0", [], [[1]], {}, {"kind": "x"})
GONE = object()


def places(value, at=()):
    """The places of a tree, of a list the first alone."""
    inside = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, one in inside:
        yield (*at, key)
        yield from places(one, (*at, key))


def put(tree, at, value):
    made = copy.deepcopy(tree)
    inside = made
    for key in at[:-1]:
        inside = inside[key]
    if value is GONE:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return made


def of_the_users_code(error, code):
    """Whether a constructor raised, or was called with something else: commands tell that as the user's error."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return str(code) in frames or str(error).startswith("Net.__init__()")


@pytest.mark.parametrize("part", [0, *(pytest.param(other, marks=pytest.mark.slow) for other in range(1, 9))])
def test_any_wrong_value_is_a_sentence(part, bundle, code):
    file = bundle / "manifest.json"
    said = json.loads(file.read_text())
    refused = []
    for turn, at in [*enumerate(places(said))][part::9]:
        for wrong in (GONE, WRONG[turn % len(WRONG)]):
            file.write_text(json.dumps(put(said, at, wrong)))
            try:
                load_bundle(str(bundle), model=str(code))
            except AmpdoctorError as error:
                refused.append(str(error))
            except Exception as error:
                if not of_the_users_code(error, code):
                    raise
    assert len(refused) > 10
    assert not any("\n" in sentence for sentence in refused)
