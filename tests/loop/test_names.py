from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ampdoctor.hooks.names import clean_names, clean_tensor_names, common_prefix_fit, match_keys, other_names


class Inner(nn.Module):
    """A user's own attribute is called `module`."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x):
        return self.module(x)


def compiled(model):
    return torch.compile(model, backend="eager")  # inductor is slow to import, and the wrapper is the same


def net():
    return nn.Sequential(nn.Linear(2, 2), Inner())


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda m: nn.DataParallel(compiled(m))])
def test_a_wrapped_root_has_the_names_of_the_bare_model(wrap):
    bare, wrapped = net(), wrap(net())
    names = clean_names(wrapped)
    assert set(names) == {name for name, _ in wrapped.named_modules()}
    assert set(names.values()) == {name for name, _ in bare.named_modules()}
    assert "1.module" in names.values()


def test_inner_wrappers_are_stripped_by_type_and_a_users_own_module_survives():
    model = nn.ModuleDict({"g": nn.DataParallel(net()), "d": checkpoint_wrapper(Inner()), "e": compiled(Inner())})
    assert set(clean_names(model).values()) == {"", "g", "g.0", "g.1", "g.1.module", "d", "d.module", "e", "e.module"}


def test_tensor_names_are_cleaned_also_where_a_wrapper_leaves_itself_out_of_the_state_dict():
    model = nn.DataParallel(nn.ModuleDict({"d": checkpoint_wrapper(Inner())}))
    assert clean_tensor_names(model, ["module.d.module.weight"]) == {"module.d.module.weight": "d.module.weight"}
    parameters = [name for name, _ in model.named_parameters()]
    assert set(clean_tensor_names(model, parameters).values()) == {"d.module.weight", "d.module.bias"}


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_a_checkpoint_go_where_that_makes_its_keys_fit(prefix):
    expected = ["a.weight", "a.bias", "b.module.weight"]
    keys = [prefix + name for name in expected]
    assert match_keys(keys, expected) == dict(zip(keys, expected, strict=True))


@pytest.mark.parametrize(
    ("expected", "matched"),
    [
        (["x", "module.x"], {"module.x": "x", "module.module.x": "module.x"}),  # the model's own attribute
        (["x", "module.x"], {"x": "x", "module.x": "module.x"}),
        (["g.w", "d.w"], {"g.module.w": "g.w", "d.module.w": "d.w"}),
        (["x"], {"module.x": "module.x", "x": "x"}),  # two keys never become one
    ],
)
def test_the_parts_that_ddp_adds_go_where_they_are_no_names_of_the_models_own(expected, matched):
    assert match_keys(list(matched), expected) == matched


def test_common_prefix_is_found_in_both_directions():
    assert common_prefix_fit(["model.a", "model.b", "other"], ["a", "b"]) == "model."
    assert common_prefix_fit(["a", "b"], ["bert.a", "bert.b"]) == "+bert."
    assert common_prefix_fit(["a", "b"], ["c", "d"]) is None


def test_other_names_of_tied_weights_and_shared_modules_without_wrappers():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared), "c": nn.Linear(2, 2)})
    model["c"].weight = shared.weight
    names = other_names(nn.DataParallel(model))
    assert names == {
        "a.0": ("b.0",),
        "b.0": ("a.0",),
        "a.0.weight": ("b.0.weight", "c.weight"),
        "b.0.weight": ("a.0.weight", "c.weight"),
        "c.weight": ("a.0.weight", "b.0.weight"),
        "a.0.bias": ("b.0.bias",),
        "b.0.bias": ("a.0.bias",),
    }
    assert other_names(nn.DataParallel(nn.Linear(2, 2))) == {}
