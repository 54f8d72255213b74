"""A step that is known to be sick only after its update: its bundle leads from a checkpoint up to it."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import textwrap
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import ampdoctor
from ampdoctor import bisect_nan
from ampdoctor.errors import AmpdoctorError, CheckpointError, ReplayError
from ampdoctor.replay.user_modules import Spec, load_object
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.human import render_human
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from ampdoctor.workflows.watch import sentence_of
from ampdoctor.workflows.watcher import TrainingWatcher
from tests.replay.bundles.test_hostile import edited

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(width, 1)

    def forward(self, x, floor):
        return self.last(self.drop(torch.log(self.norm(self.first(x)).relu() + floor)))
"""
SICK = 9
"""Takes the logarithm of what ReLU has set to 0."""


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """Returns the user's file and its class."""
    file = tmp_path_factory.mktemp("code") / "led_up_net.py"
    file.write_text(textwrap.dedent(NET))
    spec = Spec.parse(f"{file}:Net")
    return SimpleNamespace(file=str(file), made=load_object(spec, path=spec.search_path(None), reuse=True))


class Training:
    """A training in bf16 with accumulation and a schedule, whose every state is kept and which is watched or not."""

    def __init__(self, net, kind=torch.optim.AdamW, *, scaler=None, **settings):
        torch.manual_seed(0)
        self.model = net.made()
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.states = []

    def batch(self, _step):
        return torch.randn(16, 4)

    def floor(self, step):
        return 0.0 if step == SICK else 1e-3

    def added(self, _step):
        return 0.0

    def __call__(self, steps=SICK + 2):
        for step in range(steps):
            self.states.append(
                copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
            )
            self.optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = self.model(self.batch(step), self.floor(step)).pow(2).mean() + self.added(step)
                self.scaler.scale(loss / 2).backward()
            self.update()
            self.schedule.step()

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


def late(training, folder, *, steps=SICK + 2, **settings):
    """Trains where the CPU stands in for a device whose numbers come after the update; returns what is told."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TrainingWatcher, "_is_readable", lambda doctor, _: doctor.report is None and doctor._attentive > 0
        )
        with ampdoctor.watch(folder=folder, tell=told.append, **{"record_batches": 5, **settings}):
            training(steps)
    return told


def saved(training, folder, step):
    """A checkpoint from before a step, as the loop would have saved it."""
    torch.save(training.states[step], folder / f"{step}.pt")
    return str(folder / f"{step}.pt")


def asked(folder, net, checkpoint=None):
    bundle = next(folder.glob("health/bundle-*"))
    return ReplayRequest(factory=str(bundle), model=net.file, checkpoint=checkpoint, device="cpu")


def led_to(request):
    """The weights that a replay begins from, and what it says of the way to them."""
    with open_replay(request) as replay:
        session = replay.session()
        session.close()
        return session, replay.notes


def manifest(folder):
    return json.loads((folder / "health" / f"bundle-{SICK}" / "manifest.json").read_text())


@pytest.fixture(scope="module")
def adam(net, tmp_path_factory):
    """Returns a training that was sick at `SICK`, where it lies, and what was told."""
    folder, training = tmp_path_factory.mktemp("adam"), Training(net)
    told = late(training, folder / "health")
    return SimpleNamespace(training=training, folder=folder, told=told)


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=name)


def test_the_manifest_says_what_leads_up_to_the_step(adam):
    said = manifest(adam.folder)
    assert (said["schema"], said["weights"], said["updates"], said["step"]) == (3, "left out", SICK, SICK)
    assert [one["step"] for one in said["earlier"]] == [5, 6, 7, 8]
    (why,) = said["left_out"]
    assert "had changed them before it was known to be sick" in why
    assert "whose optimizer had made 5 to 9 updates; the updates since, at most 4, are in it" in why
    assert said["diagnosis"]["errors"][0]["kind"] == "too_late"
    assert said["optimizer"]["groups"][0]["settings"]["lr"] == pytest.approx(1e-2 / (1 + SICK))
    assert said["earlier"][0]["settings"][0]["lr"] == pytest.approx(1e-2 / 6)


def test_the_report_says_the_command(adam, net):
    (report,) = adam.told
    (note,) = report.errors
    bundle = str(adam.folder / "health" / f"bundle-{SICK}")
    assert note.message.endswith(f"ampdoctor bisect-nan {bundle} --checkpoint LAST --model {net.file}")
    assert report.run["kept"] == {
        "health": str(adam.folder / "health"), "bundle": bundle, "model": net.file, "from_checkpoint": True
    }  # fmt: skip
    assert sentence_of(report).endswith(f"--model {net.file}")
    shown = RenderOptions(width=200).draw(partial(render_human, report))
    assert shown.count(f"ampdoctor bisect-nan {bundle} --model {net.file}") == 2
    assert "to be replayed from a checkpoint of before it (--checkpoint), on any machine" in " ".join(shown.split())


@pytest.mark.parametrize("step", [5, 8, SICK])
def test_the_weights_before_the_step_are_come_to_bit_by_bit(step, adam, net):
    session, notes = led_to(asked(adam.folder, net, saved(adam.training, adam.folder, step)))
    before = adam.training.states[SICK]
    same(session.model.state_dict(), before["model"])
    (optimizer,) = session.optimizers.values()
    moments = optimizer.state_dict()
    for key, state in before["optimizer"]["state"].items():
        same(moments["state"][key], state)
    assert moments["param_groups"][0]["lr"] == before["optimizer"]["param_groups"][0]["lr"]
    made = [note for note in notes if "made again from the checkpoint" in note]
    assert not any("another loss" in note for note in notes)
    assert [note.split(" were ")[0].split(" was ")[0] for note in made] == (
        [] if step == SICK else [f"{SICK - step} recorded update{'' if step == 8 else 's'}"]
    )


def test_a_replay_names_the_step_and_its_op(adam, net):
    report = bisect_nan(asked(adam.folder, net, saved(adam.training, adam.folder, 6)))
    (finding, *_) = report.findings
    assert (report.verdict, finding.code, finding.where.step, finding.where.op) == ("sick", "AMP202", SICK, "aten.log")
    notes = " ".join(report.run["notes"])
    assert "the weights are made again by the recorded updates since the checkpoint" in notes
    assert "learning rate" not in " ".join(one.reason for one in report.skipped)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (4, "too long before step 9: its optimizer had made 4 updates, and the bundle holds steps 5 to 9, which go on"),
        (10, "after the update of step 9: its optimizer had made 10 updates"),
    ],
)
def test_a_checkpoint_from_elsewhere_is_refused(step, sentence, adam, net):
    with pytest.raises(CheckpointError, match=sentence):
        led_to(asked(adam.folder, net, saved(adam.training, adam.folder, step)))


def test_without_a_checkpoint_one_is_asked_for(adam, net):
    with pytest.raises(
        ReplayError, match="which the step had changed before it was known to be sick: give a checkpoint"
    ):
        bisect_nan(asked(adam.folder, net))


def test_what_leads_up_is_the_trainings_in_whatever_precision_the_step_is_replayed(adam, net):
    request = replace(asked(adam.folder, net, saved(adam.training, adam.folder, 7)), precision="fp32")
    session, _ = led_to(request)
    assert session.precision.compute == "fp32"
    same(session.model.state_dict(), adam.training.states[SICK]["model"])


def test_an_optimizer_that_does_not_count_is_taken_to_stand_before_the_first(net, tmp_path):
    training = Training(net, torch.optim.SGD, momentum=0.9)
    late(training, tmp_path / "health", record_batches=3)
    assert manifest(tmp_path)["updates"] is None
    session, notes = led_to(asked(tmp_path, net, saved(training, tmp_path, 7)))
    same(session.model.state_dict(), training.states[SICK]["model"])
    assert any("the optimizer does not count its updates" in note for note in notes)
    assert not any("another loss" in note for note in notes)
    _, notes = led_to(asked(tmp_path, net, saved(training, tmp_path, 3)))  # taken for another, which its losses show
    assert any(note.startswith("2 of the 2 recorded updates have another loss here") for note in notes)


def test_a_single_update_has_no_earlier_ones(net, tmp_path):
    training = Training(net)
    late(training, tmp_path / "health", record_batches=1)
    said = manifest(tmp_path)
    assert (said["schema"], said["weights"], "earlier" in said) == (3, "left out", False)
    assert "a checkpoint from right before it" in said["left_out"][0]
    session, _ = led_to(asked(tmp_path, net, saved(training, tmp_path, SICK)))
    same(session.model.state_dict(), training.states[SICK]["model"])
    with pytest.raises(CheckpointError, match="the bundle holds step 9 alone, which go on from 9 updates"):
        led_to(asked(tmp_path, net, saved(training, tmp_path, 8)))


def test_a_scalers_steps_are_made_through_it(net, tmp_path):
    """A loss alone is not finite, which no scaler sees."""
    training = Training(net, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**4))
    training.floor = lambda _step: 1e-3
    training.added = lambda step: torch.tensor(torch.inf if step == SICK else 0.0)
    late(training, tmp_path / "health")
    session, notes = led_to(asked(tmp_path, net, saved(training, tmp_path, 6)))
    same(session.model.state_dict(), training.states[SICK]["model"])
    assert "the loss scale is the one behind the step" in notes


def test_numbers_that_arrive_some_updates_later_are_of_their_own_step(net, tmp_path, monkeypatch):
    """The loop is ahead of its device: two updates more are made of what is not finite."""
    training, read, waiting = Training(net), TrainingWatcher._read, deque()

    def later(doctor, reading):
        waiting.append(reading)
        if len(waiting) > 2:
            read(doctor, waiting.popleft())

    monkeypatch.setattr(TrainingWatcher, "_read", later)
    late(training, tmp_path / "health", steps=SICK + 4, record_batches=3)
    said = manifest(tmp_path)
    assert (said["step"], said["updates"]) == (SICK, SICK)
    assert [one["step"] for one in said["earlier"]] == [7, 8]
    session, notes = led_to(asked(tmp_path, net, saved(training, tmp_path, 7)))
    same(session.model.state_dict(), training.states[SICK]["model"])
    assert not any("another loss" in note for note in notes)


def test_batches_that_were_overwritten_are_named(net, tmp_path):
    training = Training(net)
    place = torch.empty(16, 4)
    training.batch = lambda _step: place.copy_(torch.randn(16, 4))
    late(training, tmp_path / "health")
    said = manifest(tmp_path)
    what = "1 of the tensors that entered it were written to"
    assert f"{what} afterwards" in said["exact"]["no"]  # the first micro-batch, by the second
    assert f"of 4 of the 4 updates before it: {what} after its update" in said["exact"]["no"]


def alive(references):
    return sum(there() is not None for there in references)


def test_all_is_let_go_of(net, tmp_path):
    batches = []

    def batch(_step):
        made = torch.randn(16, 4)
        batches.append(weakref.ref(made))
        return made

    def train():
        training = Training(net)
        training.batch = batch
        training(SICK - 1)
        return weakref.ref(training.model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingWatcher, "_is_readable", lambda doctor, _: False)
        with ampdoctor.watch(folder=tmp_path / "health", tell=lambda _: None, record_batches=3):
            model = train()
            gc.collect()
            assert model() is None
            assert alive(batches) == 2 * 2
        gc.collect()
        assert alive(batches) == 0


@pytest.mark.parametrize("settings", [{"bundle": False}, {"record_batches": 0}])
def test_without_it_the_option_is_named(settings, net, tmp_path):
    (report,) = late(Training(net), tmp_path / "health", **settings)
    assert not list(tmp_path.glob("health/bundle-*"))
    assert ("record_batches=K" in report.errors[0].message) == ("bundle" not in settings)
    assert report.run["kept"] == {"health": str(tmp_path / "health")}


EDITS = {
    "empty tables": lambda said: said.update(earlier=[{}]),
    "a step less": lambda said: said["earlier"].pop(1),
    "a loss that is none": lambda said: said["earlier"][0].update(loss="0.5"),
    "another count": lambda said: said.update(updates="9"),
    "settings of nobody": lambda said: said["earlier"][0].update(settings=[]),
    "a setting that is a class": lambda said: said["earlier"][0]["settings"][0].update(
        lr={"kind": "class", "class": "subprocess:Popen"}
    ),
    "a tensor that is not there": lambda said: said["earlier"][0]["given"][0].update(key="../../etc/passwd"),
    "a buffer of nobody": lambda said: said["earlier"][0]["before"].update(nobody=said["earlier"][0]["given"][0]),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_earlier_steps_that_lie_are_refused_in_a_sentence(edit, adam, net, tmp_path):
    shutil.copytree(adam.folder / "health" / f"bundle-{SICK}", tmp_path / "health" / f"bundle-{SICK}")
    edited(tmp_path / "health" / f"bundle-{SICK}", edit)
    with pytest.raises(AmpdoctorError) as refused:
        led_to(asked(tmp_path, net, saved(adam.training, adam.folder, 6)))
    assert "\n" not in str(refused.value)
