"""Models of every shape, each with a birth at a marked line: what a diagnosis must find its way through.

A forward birth needs the loud batch of step 1; a backward birth (the derivative of sqrt at 0) and that of an update
(a gradient of zero over its norm) are there from step 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def blow(h, birth, spare=None):
    if birth == "forward":
        return h * 100.0  # BIRTH forward
    if birth == "backward":
        return h + (h - h.detach()).abs().sqrt()  # BIRTH backward
    if birth == "optimizer":
        return h + spare * 0.0  # its gradient is zero, and the optimizer divides by its norm
    return h


def give_spare(module, birth):
    """A parameter that only an update can harm."""
    module.spare = nn.Parameter(torch.ones(WIDTH)) if birth == "optimizer" else None


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

    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.lin = nn.Linear(WIDTH, WIDTH)
        give_spare(self, birth)

    def forward(self, x):
        return blow(self.lin(x), self.birth, self.spare)


class Plain(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.culprit = Block(birth)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.culprit(self.first(x)))  # CALL


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
        give_spare(self, birth)

    def forward(self, x):
        h = self.first(x)
        h = h + blow(self.inner(h), self.birth, self.spare)
        return self.head(h)


class CalledTwice(nn.Module):
    """Only the second call is sick."""

    def __init__(self, birth):
        super().__init__()
        self.culprit = Block(birth)
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


def tied_spare(birth):
    model = Plain(birth)
    model.head.spare = model.culprit.spare
    return model


def tied_and_loud(birth):
    """The weight fits fp16 where it is scaled down, not where the head casts it."""
    model = Tied(birth)
    with torch.no_grad():
        model.embed.weight[0, 0] = 1e5
    return model


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
        give_spare(self, birth)

    def forward(self, x):
        h = Square.apply(self.lin(x), self.birth)
        return h if self.spare is None else blow(h, self.birth, self.spare)


@torch.compile(backend="eager")
def compiled(h, birth, spare):
    return blow(h, birth, spare)


class Compiled(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.lin = nn.Linear(WIDTH, WIDTH)
        give_spare(self, birth)

    def forward(self, x):
        return compiled(self.lin(x), self.birth, self.spare)


class WithCompiled(Plain):
    def __init__(self, birth):
        super().__init__("")
        self.culprit = Compiled(birth)


class ScriptedInner(nn.Module):
    def __init__(self, birth: str):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.birth = birth
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        if self.birth == "forward":
            h = torch.log(h - h)
        if self.birth == "backward":
            h = h + (h - h.detach()).abs().sqrt()
        if self.birth == "optimizer":
            h = h + self.spare * 0.0
        return h


class Scripted(Plain):
    def __init__(self, birth):
        super().__init__("")
        self.culprit = torch.jit.script(ScriptedInner(birth))


class Attention(nn.Module):
    """Self-attention, added to its input so that what is loud stays loud."""

    def __init__(self, birth, layer):
        super().__init__()
        self.first, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layer = layer()
        self.norm = nn.LayerNorm(WIDTH)
        self.culprit = Block(birth)

    def forward(self, x):
        h = self.first(x)
        sequence = self.norm(h).unsqueeze(0)
        if isinstance(self.layer, nn.MultiheadAttention):
            attended, _ = self.layer(sequence, sequence, sequence)
        else:
            attended = self.layer(sequence)
        return self.head(self.culprit(h + attended[0]))


class FastPath(nn.Module):
    """A frozen encoder in eval mode and without gradients, as feature extractors are: torch fuses it into one op."""

    def __init__(self, birth):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).requires_grad_(requires_grad=False)
        self.encoder.eval()
        self.culprit = Block(birth)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            h = x + self.encoder(x.unsqueeze(0))[0]
        return self.head(self.culprit(h))


class ScaledDotProduct(nn.Module):
    """Attention in the parent's own forward, and the birth beside it."""

    def __init__(self, birth):
        super().__init__()
        self.birth = birth
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        give_spare(self, birth)

    def forward(self, x):
        q, k, v = self.qkv(x)[None, None].chunk(3, dim=-1)
        h = functional.scaled_dot_product_attention(q, k, v)[0, 0]
        return self.head(blow(h, self.birth, self.spare))


class Listed(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.blocks = nn.ModuleList([Block(""), Block(birth), Block("")])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x if index == 1 else x * 0.5)
        return self.head(x)


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Shared(nn.Module):
    """Two modules hold the same third one: it is sick only when the second calls it."""

    def __init__(self, birth):
        super().__init__()
        inner = Block(birth)
        self.left, self.right = Holder(inner), Holder(inner)
        self.birth = birth
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.left.inner.birth = ""
        h = self.left(x)
        self.right.inner.birth = self.birth
        return self.head(self.right(h))


class Lambda(nn.Module):
    def __init__(self, birth):
        super().__init__()
        give_spare(self, birth)
        self.function = lambda h: blow(h, birth, self.spare)

    def forward(self, x):
        return self.function(x)


class WithLambda(Plain):
    def __init__(self, birth):
        super().__init__("")
        self.culprit = Lambda(birth)


class KeywordOnly(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.culprit = Block(birth)

    def forward(self, *, hidden, scale=1.0):
        return {"hidden": self.culprit(hidden) * scale, "scale": scale}


class Keywords(nn.Module):
    def __init__(self, birth):
        super().__init__()
        self.first, self.body, self.head = nn.Linear(WIDTH, WIDTH), KeywordOnly(birth), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(input=self.body(hidden=self.first(x))["hidden"])


class Hooked(Plain):
    """The user's own hook changes what a layer puts out."""

    def __init__(self, birth):
        super().__init__("")
        give_spare(self.first, birth)
        self.first.register_forward_hook(lambda module, args, out: blow(out, birth, module.spare))
        self.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))


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
        out, _ = self.rnn(packed)  # RNN
        out, _ = pad_packed_sequence(out, batch_first=True)
        big = 1000.0 if self.birth == "forward" else 1.0
        return self.head(self.culprit(out.sum(1) * big))


def model_output(h):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=h)


def loud_cell(cell):
    """A recurrent weight has grown beyond what fp16 holds."""
    model = Recurrent("", cell)
    with torch.no_grad():
        model.rnn.weight_hh_l0[0, 0] = 1e5
    return model


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
    "attention": lambda birth: Attention(birth, lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "encoder_layer": lambda birth: Attention(
        birth, lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.1, batch_first=True)
    ),
    "fast_path": lambda birth: FastPath(birth).half(),
    "scaled_dot_product": ScaledDotProduct,
    "module_list": Listed,
    "shared_submodule": Shared,
    "lambda_child": WithLambda,
    "keyword_only": Keywords,
    "user_hooks": Hooked,
    "old_spectral_norm": lambda birth: Normed(birth, torch.nn.utils.spectral_norm),
    "tied_spare": tied_spare,
    "tied_and_loud": tied_and_loud,
    "loud_lstm": lambda birth: loud_cell(nn.LSTM),
    "loud_gru": lambda birth: loud_cell(nn.GRU),
    "data_parallel": lambda birth: nn.DataParallel(Plain(birth)),
    "compiled_model": lambda birth: torch.compile(Plain(birth), backend="eager"),
    "lstm": lambda birth: Recurrent(birth, nn.LSTM),
    "gru": lambda birth: Recurrent(birth, nn.GRU),
}
