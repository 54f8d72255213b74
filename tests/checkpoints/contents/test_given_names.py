"""Names of an optimizer's parameters: those that its state itself holds (torch 2.6 and later), and its groups' rule."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor.checkpoints.folder import open_checkpoint


def moments(folder, edit=lambda state: state):
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    backwards = list(model.named_parameters())[::-1]
    optimizer = torch.optim.AdamW(backwards)
    (model["second"](model["first"](torch.randn(3, 4))) ** 2).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": edit(optimizer.state_dict())}, folder / "c.pt")
    with open_checkpoint(folder / "c.pt") as checkpoint:
        held = {ref.name: ref.stored.load() for ref in checkpoint if ref.entry == "exp_avg"}
    return held, {name: optimizer.state[parameter]["exp_avg"] for name, parameter in backwards}


def test_a_moment_bears_the_name_that_the_file_gives_it(tmp_path):
    held, own = moments(tmp_path)
    assert held.keys() == own.keys()
    assert all(torch.equal(held[name], own[name]) for name in own)


def test_groups_by_the_trainers_rule_are_told_by_their_names(tmp_path):
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.gate = nn.Linear(4, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.norm(self.fc(x)) * self.gate

    torch.manual_seed(0)
    model = Gated()
    plain = {"fc.bias", "norm.weight", "norm.bias"}  # no weight decay: by shape the gate would be among them
    groups = [[p for n, p in model.named_parameters() if (n in plain) is without] for without in (False, True)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    (model(torch.randn(3, 4)) ** 2).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        held = {ref.name: ref.stored.load() for ref in checkpoint if ref.entry == "exp_avg"}
    for name, parameter in model.named_parameters():
        assert torch.equal(held[name], optimizer.state[parameter]["exp_avg"])
