"""A recorded step, run again, gives the gradients that the loop had, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import nn

from ampdoctor.hooks.callbacks import on_clip, on_scaler_call
from ampdoctor.hooks.program import Call
from ampdoctor.live.recording.recorder import StepRecorder
from ampdoctor.replay.recorded_step import run_of
from ampdoctor.replay.session import Session


class Net(nn.Module):
    """Dropout draws, batch norm writes to its buffers."""

    def __init__(self, inputs=6, outputs=4):
        super().__init__()
        self.a, self.norm = nn.Linear(inputs, 8), nn.BatchNorm1d(8)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(8, outputs)

    def encode(self, x):
        return torch.relu(self.norm(self.a(x)))

    def forward(self, x):
        return self.b(self.drop(self.encode(x)))


class Loop:
    """A loop of some steps, the last of which is held beside its program."""

    def __init__(self):
        torch.manual_seed(0)
        self.recorder = StepRecorder()
        self.scaler = None

    def scaler_called(self, scaler, method, argument, run):
        if method == "scale":
            return self.recorder.scaled(argument, run)
        result = run()
        if method == "unscale_":
            self.recorder.unscaled(argument)
        return result

    def run(self, body, steps=4):
        with self.recorder.watching(), on_scaler_call(self.scaler_called):
            for step in range(steps):
                body(step)

    def last_of(self, optimizer, loss_of):
        """The program of the last of some plain updates."""
        programs = []

        def body(step):
            optimizer.zero_grad()
            loss_of().backward()
            programs.append(self.stepped(optimizer, step, last=step == 3))

        self.run(body)
        return programs[-1]

    def stepped(self, optimizer, step, *, last):
        """Update, or compare at the last step."""
        if not last:
            optimizer.step()
            self.recorder.updated(optimizer)
            self.recorder.models.settle()
            return None
        program = self.recorder.program(optimizer, name="optimizer", scaler=self.scaler, step=step)
        real = {id(p): p.grad for group in optimizer.param_groups for p in group["params"]}
        self.recorder.away = True
        session = Session(run_of(program), device=torch.device("cpu"))
        session.has_step(0)
        start = session.snapshot()
        kept = copy.deepcopy(optimizer.state_dict())
        outcome = session.attempt(0)
        replayed = {key: next(p for p in program.model.parameters() if id(p) == key).grad for key in real}
        start.restore()
        session.close()
        assert outcome.raised is None, outcome.raised
        assert kept["param_groups"] == optimizer.state_dict()["param_groups"]
        for key, gradient in real.items():
            assert (gradient is None) == (replayed[key] is None)
            assert gradient is None or torch.equal(gradient, replayed[key])
        assert any(gradient is not None and bool(gradient.count_nonzero()) for gradient in real.values())
        return program


def adam(*models):
    return torch.optim.Adam([p for model in models for p in model.parameters()], lr=1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_plain_step(autocast):
    loop, model = Loop(), Net()

    def loss_of():
        x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return F.cross_entropy(model(x), y)

    program = loop.last_of(adam(model), loss_of)
    assert program.unexplained == ()
    assert [type(one).__name__ for one in program.instructions] == ["Call", "Op", "Backward"]
    assert set(program.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_accumulation_with_a_clip_and_a_scaler():
    loop, model = Loop(), Net()
    optimizer = adam(model)
    loop.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def body(step):
        optimizer.zero_grad()
        for _ in range(3):
            x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
            scaler.scale(F.cross_entropy(model(x), y) / 3).backward()
        scaler.unscale_(optimizer)
        with on_clip(loop.recorder.clipped):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step < 3:
            scaler.step(optimizer)
            scaler.update()
            loop.recorder.updated(optimizer)
        else:
            scaler._per_optimizer_states.clear()  # the replay begins the step anew
            loop.stepped(optimizer, step, last=True)

    loop.run(body)


def test_what_is_written_to_afterwards_is_kept_as_it_was():
    loop, model = Loop(), Net()

    def loss_of():
        x, label = torch.randn(16, 6), torch.full((16, 4), 1.0)
        first = (model(x) - label).square().mean()
        label.fill_(0.0)
        return first + 2 * (model(x) - label).square().mean()

    assert loop.last_of(adam(model), loss_of).unexplained == ()


def test_gradients_of_the_last_step_are_given_to_a_loss():
    loop, model = Loop(), Net()
    optimizer = adam(model)

    def body(step):
        loss = F.cross_entropy(model(torch.randn(16, 6)), torch.randint(0, 4, (16,)))
        before = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad()
        (loss * (1.0 + before)).backward()
        program = loop.stepped(optimizer, step, last=step == 3)
        assert program is None or program.unexplained == ()

    loop.run(body)


def test_assignments_draws_and_parts_of_a_model():
    loop, model = Loop(), Net()

    def loss_of():
        hidden = model.a(torch.randn(16, 6))  # no call of the model itself
        hidden = F.dropout(hidden, 0.5)
        hidden[:, 0] = 0.0
        out = model.b(hidden * torch.rand_like(hidden))
        return out.square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())

    program = loop.last_of(adam(model), loss_of)
    assert {one.model for one in program.instructions if isinstance(one, Call)} == {"a", "b"}


def test_a_gradient_penalty_is_run_again_too():
    loop, model = Loop(), Net(outputs=1)
    model.drop.p = 0.0

    def loss_of():
        real, fake = torch.randn(16, 6), torch.randn(16, 6)
        score = model(real).mean() - model(fake).mean()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return score + 10.0 * (gradient.norm(dim=1) - 1.0).square().mean()

    assert loop.last_of(adam(model), loss_of) is not None


def test_a_gan_keeps_what_one_step_made_for_the_next():
    loop, generator, critic = Loop(), Net(outputs=6), Net(outputs=1)
    of_critic, of_generator = adam(critic), adam(generator)

    def body(step):
        real, noise = torch.randn(16, 6), torch.randn(16, 6)
        of_critic.zero_grad()
        fake = generator(noise)
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        loop.stepped(of_critic, step, last=False)
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        program = loop.stepped(of_generator, step, last=step == 3)
        if program is not None:
            assert len([one for one in program.instructions if isinstance(one, Call)]) == 2
            assert program.unexplained == ()

    loop.run(body)


@pytest.mark.parametrize("skipping", [False, True])
def test_masters_that_no_backward_reaches_take_all_of_the_step(skipping):
    """Of a half model whose loop copies gradients to fp32 masters, and skips an update by its own judgement."""
    loop = Loop()
    model = nn.Linear(4, 2).bfloat16()
    master_weights = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(master_weights, lr=0.1)
    programs = []

    def body(step):
        model.zero_grad()
        (model(torch.full((3, 4), torch.nan if step == 1 else 1.0).bfloat16()).float().square().sum() * 8).backward()
        if step == 1 and skipping:
            return
        for master, parameter in zip(master_weights, model.parameters(), strict=True):
            master.grad = parameter.grad.float() / 8
        if step == 2:
            programs.append(loop.recorder.program(optimizer, name="optimizer", scaler=None, step=step))
        assert all(bool(loss.isfinite()) for loss in loop.recorder.losses(optimizer)) == (step != 1)
        loop.stepped(optimizer, step, last=False)

    loop.run(body, steps=3)
    (program,) = programs
    assert program.optimizer is None
    assert [type(one).__name__ for one in program.instructions].count("Backward") == 1
    assert any("master weights" in sentence for sentence in program.unexplained)
    real = [p.grad.clone() for p in model.parameters()]
    loop.recorder.away = True
    session = Session(run_of(program), device=torch.device("cpu"))
    session.has_step(0)
    session.attempt(0)
    assert all(map(torch.equal, real, (p.grad for p in model.parameters())))
    session.close()


@pytest.mark.parametrize("kept", [False, True])
def test_a_function_that_trains_again_has_the_names_of_its_own_variables(kept):
    """Also where the new model lies in memory where the last one did."""
    loop, trained = Loop(), []

    def train(_step):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop.recorder.models.search()
        for _ in range(2):
            model(torch.ones(4)).sum().backward()
            named = [loop.recorder.names()[id(p)] for p in model.parameters()]
            assert named == (["model.weight", "model.bias"] if trained else ["weight", "bias"])
            optimizer.step()
            loop.recorder.updated(optimizer)
        if kept:
            trained.append(model)

    loop.run(train, steps=8)
    assert loop.recorder.failed is None
