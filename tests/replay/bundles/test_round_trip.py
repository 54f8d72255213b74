"""A step that was written comes back bit by bit, in a model that was made again."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from torch import nn

from ampdoctor.errors import FactoryError
from ampdoctor.replay.bundles.write import write_bundle
from ampdoctor.replay.user_modules import Spec, load_object
from tests.replay.bundles.steps import gradients, load_bundle, replayed, same


@pytest.mark.parametrize("named", ["net.py", "net.py:make_model"])
def test_gradients_come_back_bit_by_bit(recorded, bundle, code, monkeypatch, named):
    real, before = gradients(recorded.model), {k: v.clone() for k, v in recorded.model.state_dict().items()}
    monkeypatch.chdir(code.parent)
    run = load_bundle(str(bundle), model=named)
    assert run.model is not recorded.model
    assert run.first_step == 31000
    assert (run.precision, run.autocast) == ("bf16", True)
    loss, found = replayed(run)
    same(found, real)
    assert torch.isfinite(loss)
    same(dict(recorded.model.state_dict()), before)  # the training's own model was not touched


def test_the_update_and_what_buffers_become_are_the_loops_own(recorded, bundle, code):
    run = load_bundle(str(bundle), model=f"{code}:make_model")
    replayed(run)
    buffers = dict(recorded.model.named_buffers())  # as the loop has them after its forwards
    same(dict(run.model.named_buffers()), buffers)
    recorded.optimizer.step()
    same(dict(run.model.named_parameters()), dict(recorded.model.named_parameters()))


def test_a_scaler_comes_back_as_it_stood(loop, theirs, code, tmp_path):
    with loop.made.recording():
        model = theirs.Net(theirs.Config(8), act=nn.GELU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)

    def train(_step):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(16, 8)).float(), torch.randint(0, 4, (16,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)

    program = loop.record(train, optimizer, steps=1, scaler=scaler)
    real = gradients(model)
    write_bundle(tmp_path / "b", program, made=loop.made.of, policy="cuda", log=['{"step": 1}'])
    run = load_bundle(str(tmp_path / "b"), model=str(code))
    assert run.scaler().state_dict() == scaler.state_dict()
    same(replayed(run)[1], real)
    assert (tmp_path / "b" / "log.jsonl").read_text() == '{"step": 1}\n'


TIED = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, ids, scale=None):
        hidden = self.embed(ids) * self.frozen
        return {"logits": self.head(hidden if scale is None else hidden * scale["factor"])}


def make_tied():
    return Tied(True)


def make_free():
    return Tied(False)
"""


@pytest.mark.parametrize(("tied", "fresh"), [(True, "make_free"), (False, "make_tied")])
def test_tied_weights_are_tied_as_they_were_and_others_are_not(loop, tmp_path, tied, fresh):
    file = tmp_path / "tied.py"
    file.write_text(textwrap.dedent(TIED))
    spec = Spec.parse(f"{file}:Tied")
    model = load_object(spec, path=spec.search_path(None), reuse=True)(tied)
    model.frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(_step):
        optimizer.zero_grad()
        out = model(torch.randint(0, 11, (4, 5)), scale={"factor": torch.tensor(2.0)})
        nn.functional.cross_entropy(out["logits"].flatten(0, 1), torch.randint(0, 11, (20,))).backward()

    program = loop.record(train, optimizer, steps=2)
    write_bundle(tmp_path / "b", program)
    if not tied:
        with pytest.raises(FactoryError, match=r"a model that ties head\.weight to embed\.weight"):
            load_bundle(str(tmp_path / "b"), model=f"{file}:{fresh}")
        return
    run = load_bundle(str(tmp_path / "b"), model=f"{file}:{fresh}")
    assert run.model.head.weight is run.model.embed.weight
    assert not run.model.frozen.requires_grad
    same(replayed(run)[1], gradients(model))


def test_a_gan_is_two_models_under_their_names(loop, tmp_path):
    generator, critic = nn.Linear(3, 5), nn.Linear(5, 1)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def train(_step):
        of_critic.zero_grad()
        fake = generator(torch.randn(8, 3)).detach()
        real = torch.randn(8, 5)
        (nn.functional.softplus(critic(fake)).mean() + nn.functional.softplus(-critic(real)).mean()).backward()

    program = loop.record(train, of_critic, steps=2)
    write_bundle(tmp_path / "b", program)
    said = json.loads((tmp_path / "b" / "manifest.json").read_text())["model"]
    assert said["kind"] == "several"
    names = list(said["children"])
    parts = ", ".join(
        f"{name!r}: nn.Linear({3 if name == 'generator' else 5}, {5 if name == 'generator' else 1})" for name in names
    )
    (tmp_path / "m.py").write_text(f"from torch import nn\n\n\ndef make():\n    return {{{parts}}}\n")
    run = load_bundle(str(tmp_path / "b"), model=f"{tmp_path / 'm.py'}:make")
    _, found = replayed(run)
    real = {name: gradient for name, gradient in found.items() if name.startswith("critic")}
    same({name.partition(".")[2]: gradient for name, gradient in real.items()}, gradients(critic))
