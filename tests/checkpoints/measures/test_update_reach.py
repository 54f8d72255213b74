"""What the next update does to stored weights, with torch's own optimizers as the judge."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.optimizer_state import reach, states_of


def optimizers(lr):
    return {
        "adam": lambda p: torch.optim.Adam(p, lr=lr),
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0, betas=(0.8, 0.95)),
        "momentum": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
    }


def looked_at(path, steps=1):
    with open_checkpoint(path) as checkpoint:
        states = states_of(checkpoint)
        refs = {(ref.role, ref.entry): ref.stored for ref in checkpoint}
        stored = next(states[id(ref.stored)] for ref in checkpoint if ref.role == "moment")
        assert stored.learning_rate is not None
        return reach(refs["weight", "weight"], stored, stored.learning_rate, steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum"])
@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_as_many_elements_change_as_torch_changes(tmp_path, dtype, name, lr):
    torch.manual_seed(1)
    layer = torch.nn.Linear(64, 64, bias=False).to(dtype)
    optimizer = optimizers(lr)[name](layer.parameters())
    gradient = torch.randn(64, 64).to(dtype)
    for _ in range(60):
        layer.weight.grad = gradient.clone()
        optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    before = layer.weight.detach().clone()
    layer.weight.grad = gradient.clone()
    optimizer.step()
    changed = float((layer.weight != before).double().mean())
    found = looked_at(tmp_path / "c.pt")
    assert found is not None
    assert found.changed_by_one == pytest.approx(changed, abs=0.03)


def test_updates_that_are_lost_one_by_one_add_up(tmp_path):
    layer = torch.nn.Linear(8, 8, bias=False).bfloat16()
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for _ in range(30):
        layer.weight.grad = torch.ones(8, 8).bfloat16()
        optimizer.step()
    assert bool((layer.weight == 1).all())  # half the distance below 1 is 2^-9
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    found = looked_at(tmp_path / "c.pt", steps=30)
    assert found is not None
    assert (found.changed_by_one, found.changed_by_many) == (0.0, 1.0)
    assert found.rms == pytest.approx(1e-3, rel=0.02)


def test_an_optimizer_whose_rule_is_not_known_gives_nothing(tmp_path):
    layer = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Adadelta(layer.parameters())
    layer.weight.grad = torch.ones(8, 8)
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert looked_at(tmp_path / "c.pt") is None
