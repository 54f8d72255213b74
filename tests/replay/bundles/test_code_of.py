"""What `--model` has to name for a bundle's model, as the report of a watched training says it."""

from __future__ import annotations

import pytest
from torch import nn

from ampdoctor.replay.bundles.model import code_of, described

MADE = {"kind": "made", "made": {"class": "__main__:GPT", "file": "gpt.py", "args": [], "kwargs": {}}}
LIBRARY = {"kind": "transformers", "class": "GPT2LMHeadModel", "config": {}}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (MADE, "gpt.py"),
        ({"kind": "wrapped", "attribute": "module", "module": MADE}, "gpt.py"),
        ({"kind": "several", "children": {"first": LIBRARY, "second": MADE}}, "gpt.py"),
        ({"kind": "function", "class": "__main__:Net", "file": "train.py", "why": ""}, "train.py:make_model"),
        ({"kind": "function", "class": "__main__:Net", "file": "a\nb.py", "why": ""}, "train.py:make_model"),
        (LIBRARY, None),
        ({"kind": "peft", "adapter": "default", "config": {}, "module": LIBRARY}, None),
    ],
    ids=["a class", "wrapped", "several", "a function", "a name that nobody types", "a library's", "with adapters"],
)
def test_a_model_is_made_again_by(said, code):
    assert code_of(said) == code


def test_torchs_own_layers_take_no_code():
    assert code_of(described(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda _module: None)) is None
