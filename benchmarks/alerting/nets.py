"""The models of the trainings: the usual architectures, so small that a step takes a millisecond on one core."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn


class HalfLinear(nn.Linear):
    """A linear layer that rounds as an fp16 product on a GPU does: operands, result and their gradients are fp16.

    Sums are fp32. A cast's derivative casts the gradient, so that gradients overflow and are flushed as in training.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + b, rounded to fp16."""
        bias = None if self.bias is None else self.bias.half().float()
        return F.linear(x.half().float(), self.weight.half().float(), bias).half().float()


class Fp8Linear(nn.Linear):
    """A linear layer whose input is rounded to e4m3 with a scale from the amax of earlier steps (delayed scaling)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("amax", torch.zeros(16))
        self.follows = True

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + b of the rounded x; its derivative passes the rounding by."""
        if self.training and self.follows:
            self.amax = torch.cat([self.amax[1:], x.detach().abs().amax().reshape(1)])
        scale = 448.0 / self.amax.amax().clamp(min=1e-12)
        rounded = (x.detach() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() / scale
        within = (x * scale).clamp(-448.0, 448.0) / scale
        return super().forward(within + (rounded - within.detach()))


class Mlp(nn.Module):
    """Hidden layers with ReLU, each behind a LayerNorm where `norm` is set."""

    def __init__(
        self,
        inputs: int,
        width: int,
        depth: int,
        outputs: int,
        *,
        norm: bool = False,
        linear: type[nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([linear(inputs if i == 0 else width, width) for i in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) if norm else nn.Identity() for _ in range(depth)])
        self.head = linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs."""
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(x)


class Cnn(nn.Module):
    """Convolutions with BatchNorm, a stride of 2 at each but the first, and a mean over the image."""

    def __init__(self, channels: int, depth: int, outputs: int) -> None:
        super().__init__()
        sizes = [1, *(channels * (1 + i // 2) for i in range(depth))]
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(a, b, 3, stride=1 if i == 0 else 2, padding=1, bias=False)
                for i, (a, b) in enumerate(pairwise(sizes))
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(size) for size in sizes[1:]])
        self.head = nn.Linear(sizes[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Causal attention of several heads, without a norm of queries and keys."""

    def __init__(self, width: int, heads: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each position gathers from those before it."""
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a LayerNorm and beside the residual stream."""

    def __init__(self, width: int, heads: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, linear)
        self.feed_in, self.feed_out = linear(width, 2 * width), linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after the block."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.feed_out(F.gelu(self.feed_in(self.norm_feed(x))))


class Transformer(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(
        self, tokens: int, width: int, *, blocks: int, heads: int, context: int, linear: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, linear) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), linear(width, tokens)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of each position's next token."""
        x = self.embedding(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """Reads numbers one by one and answers with one at the end; a plain ReLU network begins as the identity (IRNN)."""

    def __init__(self, kind: str, inputs: int, width: int) -> None:
        super().__init__()
        if kind == "gru":
            self.recurrent: nn.RNNBase = nn.GRU(inputs, width, batch_first=True)
        else:
            self.recurrent = nn.RNN(inputs, width, nonlinearity=kind, batch_first=True)
        if kind == "relu":
            nn.init.eye_(self.recurrent.weight_hh_l0)
            nn.init.zeros_(self.recurrent.bias_hh_l0)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns an answer per sequence."""
        states, _ = self.recurrent(x)
        return self.head(states[:, -1])


class Autoencoder(nn.Module):
    """Through a bottleneck and back; with `variational`, the bottleneck is drawn from a Gaussian."""

    def __init__(
        self, inputs: int, width: int, code: int, *, variational: bool = False, linear: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        self.variational = variational
        self.encoder_in, self.encoder_out = linear(inputs, width), linear(width, code * (1 + variational))
        self.decoder_in, self.decoder_out = linear(code, width), linear(width, inputs)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns what was decoded, and the divergence of the codes from a standard normal (0 if not variational)."""
        code = self.encoder_out(F.gelu(self.encoder_in(x)))
        divergence = x.new_zeros(())
        if self.variational:
            mean, log_variance = code.chunk(2, dim=1)
            divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(1).mean()
            code = mean if noise is None else mean + noise * (0.5 * log_variance).exp()
        return self.decoder_out(F.gelu(self.decoder_in(code))), divergence


class TwoTowers(nn.Module):
    """Two encoders that meet in one space, and the temperature that their similarities are divided by."""

    def __init__(self, inputs: tuple[int, int], width: int, code: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(inputs[0], width), nn.ReLU(), nn.Linear(width, code))
        self.right = nn.Sequential(nn.Linear(inputs[1], width), nn.ReLU(), nn.Linear(width, code))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns the scaled similarities of each left with each right."""
        codes = F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1)
        return self.logit_scale.exp() * codes[0] @ codes[1].T


class Mixture(nn.Module):
    """Experts of which a softmax gate chooses two for each input."""

    def __init__(self, inputs: int, width: int, experts: int, outputs: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs, and how unevenly the experts are used (Switch's balance loss)."""
        shares = self.gate(x).softmax(1)
        best, chosen = shares.topk(2, dim=1)
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = answers.gather(1, chosen[:, :, None].expand(-1, -1, answers.shape[2]))
        mixed = (picked * (best / best.sum(1, keepdim=True))[:, :, None]).sum(1)
        used = F.one_hot(chosen[:, 0], shares.shape[1]).float().mean(0)
        return mixed, shares.shape[1] * (used * shares.mean(0)).sum()
