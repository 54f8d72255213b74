"""Models of every shape, each with a birth at a marked line: what a diagnosis must find its way through.

`make_run(shape, birth)` is a factory as users write it. A forward birth needs the large batch of step 1; a backward
birth (the derivative of sqrt at 0) is there from step 0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from ampdoctor import TrainingRun

WIDTH = 8
STEPS = 3


def blow(h, birth):
    if birth == "forward":
        return h * 100.0  # BIRTH forward
    if birth == "backward":
        return h + (h - h.detach()).abs().sqrt()  # BIRTH backward
    return h


class Block(nn.Module):
    """The culprit, where it is a module."""

    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return blow(self.lin(x), self.birth)


class Plain(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.culprit = Block(birth)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.culprit(self.first(x)))


class Checkpointed(Plain):
    def __init__(self, birth, *, reentrant):
        super().__init__(birth)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.culprit, self.first(x), use_reentrant=self.reentrant))


class InPlace(Plain):
    def __init__(self, birth):
        super().__init__(birth)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.culprit(self.act(self.first(x)))
        h += 1.0
        return self.head(self.act(h))


class Residual(nn.Module):
    """The birth lies in the parent, between its children."""

    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.first, self.inner, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        h = self.first(x)
        h = h + blow(self.inner(h), self.birth)
        return self.head(h)


class CalledTwice(nn.Module):
    """Only the second call is sick."""

    def __init__(self, birth):
        super().__init__()
        self.culprit = Block("")
        self.birth = birth
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.culprit.birth = ""
        h = self.culprit(x)
        self.culprit.birth = self.birth
        h = self.culprit(h)
        return self.head(h)


class Tied(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.culprit = Block(birth)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = functional.linear(x, self.embed.weight * 0.1)
        return self.head(self.culprit(h) * 0.1)


class ReturnsInput(nn.Module):
    def forward(self, x):
        return x


class Identities(Plain):
    def __init__(self, birth):
        super().__init__(birth)
        self.nothing = ReturnsInput()

    def forward(self, x):
        return self.nothing(self.head(self.nothing(self.culprit(self.nothing(self.first(self.nothing(x)))))))


@dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Wrapped(nn.Module):
    """Hands its output on in a container."""

    def __init__(self, birth, wrap):
        super().__init__()
        self.culprit = Block(birth)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.culprit(x))


class Containers(nn.Module):
    def __init__(self, birth, wrap, unwrap):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = Wrapped(birth, wrap)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unwrap = unwrap

    def forward(self, x):
        return self.head(self.unwrap(self.body(self.first(x))))


class FrozenBackbone(Plain):
    def __init__(self, birth):
        super().__init__(birth)
        self.first.requires_grad_(requires_grad=False)
        self.first.eval()


class Normed(Plain):
    def __init__(self, birth, norm):
        super().__init__(birth)
        norm(self.culprit.lin)
        norm(self.head)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, birth):
        ctx.birth = birth
        if birth == "forward":
            return x * 100.0  # CUSTOM forward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.birth == "backward":
            return grad / torch.zeros_like(grad), None  # CUSTOM backward
        return grad, None


class CustomFunction(Plain):
    def __init__(self, birth):
        super().__init__("")
        self.culprit = Custom(birth)


class Custom(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Square.apply(self.lin(x), self.birth)


@torch.compile(backend="eager")
def compiled(h, birth):
    return blow(h, birth)


class Compiled(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return compiled(self.lin(x), self.birth)


class WithCompiled(Plain):
    def __init__(self, birth):
        super().__init__("")
        self.culprit = Compiled(birth)


class ScriptedInner(nn.Module):
    def __init__(self, *, sick: bool):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.sick = sick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        if self.sick:
            h = torch.log(h - h)
        return h


class Scripted(Plain):
    def __init__(self, birth):
        super().__init__("")
        self.culprit = torch.jit.script(ScriptedInner(sick=birth == "forward"))


class Recurrent(nn.Module):
    def __init__(self, birth, cell):
        super().__init__()
        self.rnn = cell(WIDTH, WIDTH, batch_first=True)
        self.culprit = Block(birth)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.birth = birth

    def forward(self, x):
        steps = x.unsqueeze(1).expand(-1, 3, -1)
        packed = pack_padded_sequence(steps, torch.tensor([3, 2, 1, 1]), batch_first=True)
        out, _ = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        big = 1000.0 if self.birth == "forward" else 1.0
        return self.head(self.culprit(out.sum(1) * big))


class Rows(Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        x, y = rows()
        x = x * 1000 if 4 <= index < 8 else x
        return x[index % 4], y[index % 4]


def rows():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, WIDTH, generator=generator).abs() + 0.5
    return x, torch.randint(0, WIDTH, (4,), generator=generator)


def batches():
    for step in range(STEPS):
        x, y = rows()
        yield (x * 1000 if step == 1 else x), y


def loss_of(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x).float(), y)


def loss_in_place(model, batch):
    x, y = batch
    x.div_(2.0)
    y.add_(1).remainder_(WIDTH)
    return loss_of(model, batch)


def penalty(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    return functional.cross_entropy(out.float(), y) + 1e-3 * (gradient.float().pow(2).sum(1) - 1).abs().mean()


def penalty_born_in_it(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    norm = (gradient - gradient.detach()).norm(dim=1)
    return functional.cross_entropy(out.float(), y) + torch.log(norm).mean()  # PENALTY


def model_output(h):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=h)


def encodings():
    from transformers import BatchEncoding

    for x, y in batches():
        yield BatchEncoding({"x": x, "y": y})


def two_optimizers(model):
    return {
        "body": torch.optim.SGD([*model.first.parameters(), *model.culprit.parameters()], lr=1e-3),
        "head": torch.optim.Adam(model.head.parameters(), lr=1e-3),
    }


MODELS = {
    "reentrant": lambda birth: Checkpointed(birth, reentrant=True),
    "nonreentrant": lambda birth: Checkpointed(birth, reentrant=False),
    "in_place": InPlace,
    "residual": Residual,
    "called_twice": CalledTwice,
    "tied": Tied,
    "returns_input": Identities,
    "dict_output": lambda birth: Containers(birth, lambda h: {"logits": h}, lambda o: o["logits"]),
    "dataclass_output": lambda birth: Containers(birth, Output, lambda o: o.logits),
    "model_output": lambda birth: Containers(birth, model_output, lambda o: o.last_hidden_state),
    "frozen_backbone": FrozenBackbone,
    "weight_norm": lambda birth: Normed(birth, parametrizations.weight_norm),
    "old_weight_norm": lambda birth: Normed(birth, torch.nn.utils.weight_norm),
    "spectral_norm": lambda birth: Normed(birth, parametrizations.spectral_norm),
    "custom_function": CustomFunction,
    "compiled_function": WithCompiled,
    "scripted_child": Scripted,
    "lstm": lambda birth: Recurrent(birth, nn.LSTM),
    "gru": lambda birth: Recurrent(birth, nn.GRU),
}


def make_run(shape: str = "plain", birth: str = "forward"):
    torch.manual_seed(0)
    model = MODELS.get(shape, Plain)(birth)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    extra = {}
    if shape == "gradient_penalty":
        extra = {"loss": penalty}
    elif shape == "penalty_born_in_it":
        extra = {"loss": penalty_born_in_it}
    elif shape == "loss_edits_batch":
        extra = {"loss": loss_in_place}
    elif shape == "two_optimizers":
        extra = {"optimizer": two_optimizers}
    elif shape == "accumulation":
        extra = {"accumulation_steps": 4, "batches": [b for b in batches() for _ in range(4)]}
    elif shape == "batch_encoding":
        extra = {"batches": encodings, "loss": lambda m, b: loss_of(m, (b["x"], b["y"]))}
    elif shape == "loader_generator":
        generator = torch.Generator().manual_seed(7)
        extra = {"batches": DataLoader(Rows(), batch_size=4, generator=generator)}
    elif shape == "loader_workers":
        extra = {"batches": DataLoader(Rows(), batch_size=4, num_workers=1)}
    elif shape == "prints_argv":
        print("user prints", sys.argv)  # noqa: T201 - what the case is about
    given = {
        "model": model,
        "batches": batches,
        "loss": loss_of,
        "optimizer": lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-4),
        "scaler": {"init_scale": 4.0},
        **extra,
    }
    return TrainingRun(**given)
