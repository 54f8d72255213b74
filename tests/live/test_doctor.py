from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.reports.forms.to_json import render_json
from ampdoctor.reports.words.words import place
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


@pytest.mark.parametrize("model", [None, nn.Linear(4, 2)])
def test_a_bundle_that_holds_nothing_is_not_kept(model, tmp_path):
    told, said = [], []
    weight = torch.ones(4, requires_grad=True) if model is None else None
    optimizer = torch.optim.SGD([weight] if model is None else model.parameters(), lr=0.1)
    watching = doctor.Doctor(WatchRequest(health=str(tmp_path), script="train.py"), told.append, said.append)
    with watching.attending():
        batch = torch.full((4,), torch.nan)
        (batch * weight if model is None else model(batch)).sum().backward()
        optimizer.step()
    watching.ended(None)
    assert (tmp_path / "bundle-0").exists() == ("bundle" in told[0].run["kept"]) == (model is not None)
    assert any("bisect-nan" in sentence for sentence in said) is False


@pytest.mark.parametrize("sick", [False, True])
def test_a_scaler_that_skips_masters_may_settle(sick, tmp_path):
    """Where it would let them step cannot be asked; a loss that is not finite is looked at."""
    told, said = [], []
    model = nn.Linear(4, 2).half()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer, scaler = torch.optim.SGD(masters, lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    watching = doctor.Doctor(WatchRequest(health=str(tmp_path), script="train.py"), told.append, said.append)
    with watching.attending():
        for step in range(10):
            model.zero_grad()
            batch = torch.full((4,), torch.nan if sick and step == 9 else 1.0).half()
            scaler.scale(model(batch).float().square().sum()).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            scaler.step(optimizer)
            scaler.update()
    watching.ended(None)
    assert said == ["step 0 was skipped by its scaler, and could not be run again: that may be health"]
    assert [finding.code for report in told for finding in report.findings] == (["AMP204"] if sick else [])


@pytest.mark.parametrize("several", [False, True])
def test_of_several_optimizers_it_is_said_whose_step_was_sick(several, tmp_path, check_report):
    told = []
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 1)
    opt_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=0.1)
    watching = doctor.Doctor(WatchRequest(health=str(tmp_path), script="train.py"), told.append, told.append)
    with watching.attending():
        for step in range(2):
            if several:
                critic(torch.ones(4)).sum().backward()
                opt_critic.step()
            (actor(torch.ones(4)) / (1 - step)).sum().backward()
            opt_actor.step()
    watching.ended(None)
    (report,) = told
    said = "opt_actor (Adam, optimizer2 in the log)" if several else None
    assert check_report(render_json(report))["run"].get("optimizer") == said


def test_a_batch_is_bad_as_a_whole_and_its_parts_go_by_what_takes_them(tmp_path):
    """Returns and advantages are made of the same rewards: one cause, and one error."""
    told = []
    model = nn.Bilinear(4, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewards = torch.full((3, 1), torch.nan)
    watching = doctor.Doctor(WatchRequest(health=str(tmp_path), script="train.py"), told.append, told.append)
    with watching.attending():
        values = model(torch.ones(3, 4), torch.ones(3, 4).fill_(torch.nan))
        (values * rewards).sum().backward(retain_graph=True)
        (values * (rewards - 1)).sum().backward()
        optimizer.step()
    watching.ended(None)
    (finding,) = told[0].findings
    assert (finding.code, finding.where.tensor[:19]) == ("AMP204", "input2 at test_doct")
    assert finding.evidence["also_count"] == len(finding.evidence["also"]) == 1
    assert all(one["tensor"].startswith("what mul takes at test_doctor.py:") for one in finding.evidence["also"])
    assert finding.prescription.detail.startswith("Check or drop this batch")


def test_an_op_whose_derivative_fails_may_be_the_loops(tmp_path):
    told = []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = doctor.Doctor(WatchRequest(health=str(tmp_path), script="train.py"), told.append, told.append)
    with watching.attending():
        (model(torch.ones(3, 4)) * 0).sqrt().sum().backward()
        optimizer.step()
    watching.ended(None)
    (finding,) = told[0].findings
    assert (finding.where.phase, finding.where.module) == ("backward", "")
    assert "the root module's own code or the loop's" in place(finding.where)
