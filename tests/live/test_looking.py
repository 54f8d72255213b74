"""What a look at a recorded step finds, and that it leaves everything as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import nn

from ampdoctor.workflows.requests import WatchRequest
from ampdoctor.workflows.watcher import TrainingWatcher


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.norm(self.a(x)))))


def everything(model, optimizer, scaler):
    """All that a training goes on from."""
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "states": dict(scaler._per_optimizer_states),
            "random": torch.get_rng_state(),
        }
    )


def equal(here, there):
    if isinstance(here, torch.Tensor):
        return torch.equal(here.nan_to_num(7.0), there.nan_to_num(7.0))
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(equal(here[key], there[key]) for key in here)
    if isinstance(here, list | tuple):
        return len(here) == len(there) and all(map(equal, here, there))
    return here == there


def trained(tmp_path, monkeypatch, *, fault, watched=True):
    """Train, watched or bare; returns the doctor, the diagnoses that it told, and the end of the training."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    told, said = [], []
    doctor = TrainingWatcher(
        WatchRequest(health=str(tmp_path / "health"), script="train.py", every=2), told.append, said.append
    )
    examine = doctor._examine

    def held_beside(*args, **kwargs):
        before = everything(model, optimizer, scaler)
        examine(*args, **kwargs)
        assert equal(before, everything(model, optimizer, scaler))

    monkeypatch.setattr(doctor, "_examine", held_beside)

    def loop():
        for step in range(6):
            x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
            optimizer.zero_grad()
            if fault == "data" and step == 3:
                x[0, 0] = float("nan")
            with torch.autocast("cpu", torch.float16):
                out = model(x)
                if fault == "backward" and step == 3:
                    out = out + (out - out.detach()).abs().sqrt()
                loss = F.cross_entropy(out.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    if watched:
        with doctor.attending():
            loop()
        doctor.ended(None)
    else:
        loop()
    assert not said
    return doctor, told, everything(model, optimizer, scaler)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("data", ("AMP204", "data", "data")),
        ("backward", ("AMP202", "backward", "aten.sqrt")),
    ],
)
def test_the_step_the_place_and_the_cause(tmp_path, monkeypatch, fault, expected):
    doctor, told, _ = trained(tmp_path, monkeypatch, fault=fault)
    assert doctor.report is told[0]
    finding = doctor.report.findings[0]
    assert (finding.code, finding.where.phase, finding.where.op) == expected
    assert finding.where.step == 3
    assert (tmp_path / "health" / "bundle-3" / "manifest.json").is_file()


def test_the_training_that_goes_on_is_the_one_that_would_have_gone_on(tmp_path, monkeypatch):
    _, _, watched = trained(tmp_path, monkeypatch, fault="backward")
    _, _, bare = trained(tmp_path, monkeypatch, fault="backward", watched=False)
    assert equal(watched, bare)
