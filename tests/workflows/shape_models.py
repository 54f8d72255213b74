"""Models of every shape, each with an origin at a marked line: what a diagnosis must find its way through.

A forward origin needs the loud batch of step 1; a backward origin (the derivative of sqrt at 0) and that of an update
(a gradient of zero over its norm) are there from step 0.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def blow(h, origin, spare=None):
    if origin == "forward":
        return h * 100.0  # BIRTH forward
    if origin == "backward":
        return h + (h - h.detach()).abs().sqrt()  # BIRTH backward
    if origin == "optimizer":
        return h + spare * 0.0  # its gradient is zero, and the optimizer divides by its norm
    return h


def give_spare(module, origin):
    """A parameter that only an update can harm."""
    module.spare = nn.Parameter(torch.ones(WIDTH)) if origin == "optimizer" else None


class Normalised(torch.optim.SGD):
    """Steps of one length for each tensor, and no epsilon."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=1e-4)  # BIRTH optimizer


class Block(nn.Module):
    """The culprit, where it is a module."""

    def __init__(self, origin):
        super().__init__()
        self.origin = origin
        self.lin = nn.Linear(WIDTH, WIDTH)
        give_spare(self, origin)

    def forward(self, x):
        return blow(self.lin(x), self.origin, self.spare)


class Plain(nn.Module):
    def __init__(self, origin):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.culprit = Block(origin)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.culprit(self.first(x)))  # CALL


class Checkpointed(Plain):
    def __init__(self, origin, *, reentrant):
        super().__init__(origin)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.culprit, self.first(x), use_reentrant=self.reentrant))


class CalledTwice(nn.Module):
    """Only the second call is sick."""

    def __init__(self, origin):
        super().__init__()
        self.culprit = Block(origin)
        self.origin = origin
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.culprit.origin = ""
        h = self.culprit(x)
        self.culprit.origin = self.origin
        h = self.culprit(h)
        return self.head(h)


class Tied(nn.Module):
    def __init__(self, origin):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.culprit = Block(origin)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = functional.linear(x, self.embed.weight * 0.1)
        return self.head(self.culprit(h) * 0.1)


def tied_and_loud(origin):
    """The weight fits fp16 where it is scaled down, not where the head casts it."""
    model = Tied(origin)
    with torch.no_grad():
        model.embed.weight[0, 0] = 1e5
    return model


class FrozenBackbone(Plain):
    def __init__(self, origin):
        super().__init__(origin)
        self.first.requires_grad_(requires_grad=False)
        self.first.eval()


class Normed(Plain):
    def __init__(self, origin, norm):
        super().__init__(origin)
        norm(self.culprit.lin)
        norm(self.head)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, origin):
        ctx.origin = origin
        if origin == "forward":
            return x * 100.0  # CUSTOM forward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.origin == "backward":
            return grad / torch.zeros_like(grad), None  # CUSTOM backward
        return grad, None


class CustomFunction(Plain):
    def __init__(self, origin):
        super().__init__("")
        self.culprit = Custom(origin)


class Custom(nn.Module):
    def __init__(self, origin):
        super().__init__()
        self.origin = origin
        self.lin = nn.Linear(WIDTH, WIDTH)
        give_spare(self, origin)

    def forward(self, x):
        h = Square.apply(self.lin(x), self.origin)
        return h if self.spare is None else blow(h, self.origin, self.spare)


class ScriptedInner(nn.Module):
    def __init__(self, origin: str):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.origin = origin
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        if self.origin == "forward":
            h = torch.log(h - h)
        if self.origin == "backward":
            h = h + (h - h.detach()).abs().sqrt()
        if self.origin == "optimizer":
            h = h + self.spare * 0.0
        return h


class Scripted(Plain):
    def __init__(self, origin):
        super().__init__("")
        self.culprit = torch.jit.script(ScriptedInner(origin))


class FastPath(nn.Module):
    """A frozen encoder in eval mode and without gradients, as feature extractors are: torch fuses it into one op."""

    def __init__(self, origin):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).requires_grad_(requires_grad=False)
        self.encoder.eval()
        self.culprit = Block(origin)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            h = x + self.encoder(x.unsqueeze(0))[0]
        return self.head(self.culprit(h))


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Shared(nn.Module):
    """Two modules hold the same third one: it is sick only when the second calls it."""

    def __init__(self, origin):
        super().__init__()
        inner = Block(origin)
        self.left, self.right = Holder(inner), Holder(inner)
        self.origin = origin
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.left.inner.origin = ""
        h = self.left(x)
        self.right.inner.origin = self.origin
        return self.head(self.right(h))


class Hooked(Plain):
    """The user's own hook changes what a layer puts out."""

    def __init__(self, origin):
        super().__init__("")
        give_spare(self.first, origin)
        self.first.register_forward_hook(lambda module, args, out: blow(out, origin, module.spare))
        self.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))


class Recurrent(nn.Module):
    def __init__(self, origin, cell):
        super().__init__()
        self.rnn = cell(WIDTH, WIDTH, batch_first=True)
        self.culprit = Block(origin)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.origin = origin

    def forward(self, x):
        steps = x.unsqueeze(1).expand(-1, 3, -1)
        packed = pack_padded_sequence(steps, torch.tensor([3, 2, 1, 1]), batch_first=True)
        out, _ = self.rnn(packed)  # RNN
        out, _ = pad_packed_sequence(out, batch_first=True)
        big = 1000.0 if self.origin == "forward" else 1.0
        return self.head(self.culprit(out.sum(1) * big))


def loud_cell(cell):
    """A recurrent weight has grown beyond what fp16 holds."""
    model = Recurrent("", cell)
    with torch.no_grad():
        model.rnn.weight_hh_l0[0, 0] = 1e5
    return model


MODELS = {
    "reentrant": lambda origin: Checkpointed(origin, reentrant=True),
    "nonreentrant": lambda origin: Checkpointed(origin, reentrant=False),
    "called_twice": CalledTwice,
    "tied": Tied,
    "frozen_backbone": FrozenBackbone,
    "weight_norm": lambda origin: Normed(origin, parametrizations.weight_norm),
    "custom_function": CustomFunction,
    "scripted_child": Scripted,
    "fast_path": lambda origin: FastPath(origin).half(),
    "shared_submodule": Shared,
    "user_hooks": Hooked,
    "tied_and_loud": tied_and_loud,
    "loud_lstm": lambda origin: loud_cell(nn.LSTM),
    "data_parallel": lambda origin: nn.DataParallel(Plain(origin)),
    "compiled_model": lambda origin: torch.compile(Plain(origin), backend="eager"),
    "lstm": lambda origin: Recurrent(origin, nn.LSTM),
}
