from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.workflows import doctor
from ampdoctor.workflows.opening.watch_request import WatchRequest


@pytest.mark.parametrize("fused", [False, True])
def test_one_look_sees_how_far_a_scaler_settles(fused, tmp_path, monkeypatch):
    """What its scaler has sent to a fused optimizer is away while it looks: torch would multiply the scales."""
    seen, sent = [], []
    look = doctor.look

    def spied(program, **options):
        with doctor.at_its_begin(program):
            sent.append("grad_scale" in vars(program.optimizer))
        sent.append("grad_scale" in vars(program.optimizer))
        seen.append(look(program, **options))
        return seen[-1]

    monkeypatch.setattr(doctor, "look", spied)
    told = []
    watching = doctor.Doctor(WatchRequest(health=str(tmp_path), script="train.py"), told.append, told.append)
    with watching.attending():
        scale, skipped = trained(fused)
    watching.ended(None)
    assert told == []
    assert sent == [False, fused]
    assert [one.backoffs for one in seen] == [skipped]
    assert (scale, skipped) == (2.0**20 / 2.0**skipped, skipped)
    assert skipped > 4


def trained(fused):
    """A few steps over the same batch, from a scale that is too high: the last one, and how many were skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    batch, skipped = torch.randn(4, 8), 0
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().pow(2).mean() * 100
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return scaler.get_scale(), skipped
