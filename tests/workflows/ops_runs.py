"""One op that goes wrong in a small fp16, bf16 or fp32 model: name, op, cause and phase, for many ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as users write it

from ampdoctor import TrainingRun

ROWS = torch.tensor([1.0, -1.0] * 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the culprit computes from `h` (8 x 8, small numbers in the run's format), and what is to be found."""

    fn: Callable
    op: str
    cause: str = ""
    nonfinite: str = "inf"
    precision: str = "fp16"
    made_by: str | None = None
    children: Callable[[], dict] = field(default=dict)
    also: tuple[str, ...] = ()
    """Other names of the op."""


class Culprit(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case
        for name, child in case.children().items():
            setattr(self, name, child)

    def forward(self, h):
        return self.case.fn(self, h)


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body = nn.Sequential(Culprit(case))

    def forward(self, x):
        return self.body(self.first(x))


def value(h, number):
    """A tensor of one number that still depends on h."""
    return h * 0 + number


def signs(h, number):
    return value(h, number) * ROWS.to(h.dtype)


def same(h, number):
    """Rows (+, +, -, -) of one number: a sum of 0 whose partial sums are not."""
    return torch.stack([value(h, number)[0], value(h, number)[0], value(h, -number)[0], value(h, -number)[0]])


OVER = {
    "linear": Case(fn=lambda s, h: s.l(value(h, 6e4)) * 1, op="linear", children=lambda: {"l": loud(nn.Linear(8, 8))}),
    "scaled_dot_product_attention": Case(
        fn=lambda s, h: F.scaled_dot_product_attention(*[h.view(1, 1, 8, 8)] * 2, value(h, 1e38).view(1, 1, 8, 8) * 10),
        op="mul",
        precision="bf16",
    ),
    "matmul": Case(fn=lambda s, h: value(h, 3e4) @ value(h, 3e4), op="matmul"),
    "mul_": Case(fn=lambda s, h: value(h, 3e4).mul_(4), op="mul_"),
    "exp_beyond_float64": Case(fn=lambda s, h: value(h, 1000.0).exp(), op="exp"),
    "exp_beyond_float32": Case(fn=lambda s, h: value(h, 200.0).exp(), op="exp"),
    "cast": Case(fn=lambda s, h: value(h.float(), 1e5).half(), op="_to_copy"),
    "sum_in_half": Case(fn=lambda s, h: value(h, 6e4).sum(dtype=torch.float16), op="sum"),
    "embedding_bag": Case(
        fn=lambda s, h: F.embedding_bag(torch.arange(8)[None], value(h, 3e4), mode="sum"), op="embedding_bag"
    ),
    "index_put": Case(
        fn=lambda s, h: torch.zeros(2).half().index_put((torch.zeros(8).long(),), value(h, 3e4)[0], accumulate=True),
        op="index_put",
    ),
    "index_put_slice": Case(fn=lambda s, h: assigned(h), op="_to_copy", also=("copy_",)),
    "cross_entropy": Case(
        fn=lambda s, h: F.cross_entropy(signs(h.float(), 3e38), torch.ones(8).long(), reduction="none"),
        op="cross_entropy_loss",
        precision="bf16",
    ),
    "softmax_of_inf": Case(fn=lambda s, h: (value(h, 3e4) * 4).softmax(-1), op="mul"),
    "absorbed_upstream": Case(
        fn=lambda s, h: (value(h, 3e4) * 4).tanh() + (value(h, 3e4) * 4 - value(h, 3e4)), op="mul"
    ),
    "chained_in_float32": Case(fn=lambda s, h: value(h.float(), 1e38) * 10, op="mul", precision="fp32"),
}
"""Overflows: beyond the format, by what float64 says."""

INSIDE = {
    "layer_norm": Case(
        fn=lambda s, h: s.n(signs(h, 1e30)),
        op="layer_norm",
        nonfinite="nan",
        precision="bf16",
        children=lambda: {"n": nn.LayerNorm(8)},
    ),
    "batch_norm": Case(
        fn=lambda s, h: s.n(signs(h, 1e30).t()),
        op="batch_norm",
        precision="bf16",
        children=lambda: {"n": nn.BatchNorm1d(8)},
    ),
    "mean": Case(fn=lambda s, h: value(h.float(), 2e38).mean(-1), op="mean", precision="bf16"),
    "norm": Case(
        fn=lambda s, h: value(h.float(), 1e30).norm(dim=-1), op="norm", precision="bf16", also=("linalg_vector_norm",)
    ),
    "index_put_that_cancels": Case(
        fn=lambda s, h: torch.zeros(2).half().index_put((torch.zeros(4).long(),), same(h, 6e4)[:, 0], accumulate=True),
        op="index_put",
    ),
    "cross": Case(
        fn=lambda s, h: torch.linalg.cross(value(h, 6e4)[:, :3], value(h, 6e4)[:, :3]),
        op="linalg_cross",
        nonfinite="nan",
    ),
}
"""Overflows of a partial result: in float64 the whole is finite and in range."""

INVALID = {
    "div": Case(fn=lambda s, h: h / (h * 0 + 1e-8), op="div", made_by="flushed_epsilon"),
    "div_by_count": Case(fn=lambda s, h: h.sum() / (h > 1e4).sum(), op="div", made_by="computed"),
    "div_by_int": Case(fn=lambda s, h: h / torch.zeros(8).long(), op="div", made_by="constant"),
    "reciprocal": Case(fn=lambda s, h: (h * 1e-9).reciprocal(), op="reciprocal", made_by="flushed"),
    "log1p": Case(fn=lambda s, h: torch.log1p(-value(h, 20.0).sigmoid()), op="log1p", made_by="rounded_to_one"),
    "acos": Case(fn=lambda s, h: value(h, 1.5).acos(), op="acos", nonfinite="nan", made_by="computed"),
    "mean_of_nothing": Case(fn=lambda s, h: h[:0].mean() + h, op="mean", nonfinite="nan", made_by="empty_input"),
    "masked_row": Case(
        fn=lambda s, h: h.masked_fill(torch.ones(8).bool(), -math.inf).softmax(-1),
        op="softmax",
        nonfinite="nan",
        made_by="masked_row",
    ),
    "infinity_times_zero": Case(
        fn=lambda s, h: h * torch.full((8,), math.inf) * torch.zeros(8), op="mul", nonfinite="nan", made_by="infinity"
    ),
    "normal_of_float32": Case(
        fn=lambda s, h: 1 / (h * 0), op="div", precision="fp32", made_by="computed", also=("reciprocal",)
    ),
}
"""Out of the domain, in float64 from the same inputs as well."""

BACKWARD = {
    "sqrt": Case(fn=lambda s, h: (h * 0).abs().sqrt() + 1, op="sqrt", made_by="computed"),
    "sqrt_of_a_flushed_epsilon": Case(
        fn=lambda s, h: ((h * 0) + 1e-9).sqrt() + 1, op="sqrt", made_by="flushed_epsilon"
    ),
    "where_hides_the_forward": Case(
        fn=lambda s, h: torch.where(h > 1e4, (h * 0).abs().sqrt(), h), op="sqrt", nonfinite="nan", made_by="computed"
    ),
    "acos": Case(fn=lambda s, h: value(h, 1e-3).cos().acos(), op="acos", made_by="rounded_to_one"),
    "log_of_tiny": Case(
        fn=lambda s, h: value(h, 1e-7).half().log() + 15.9, op="log", cause="scaler_collapse", also=("_to_copy",)
    ),
    "div_by_tiny": Case(fn=lambda s, h: (h * 0 + 1e-3) / value(h, 1e-7).half(), op="div", cause="backward_overflow"),
}
"""Derivatives that fail where the forward does not."""


def loud(layer):
    with torch.no_grad():
        layer.weight.fill_(4.0)
    return layer


def assigned(h):
    made = torch.zeros(8, 8).half()
    made[:, :4] = value(h.float(), 1e5)[:, :4]
    return made + h


CAUSES = {"over": "forward_overflow", "inside": "forward_overflow", "invalid": "invalid_op", "backward": "invalid_op"}
ALL = {"over": OVER, "inside": INSIDE, "invalid": INVALID, "backward": BACKWARD}


def make_run(group: str, case: str) -> TrainingRun:
    torch.manual_seed(0)
    chosen = ALL[group][case]
    model = Net(chosen)
    generator = torch.Generator().manual_seed(1)
    return TrainingRun(
        model=model,
        batches=[torch.randn(8, 4, generator=generator) for _ in range(2)],
        loss=lambda m, x: m(x).float().abs().clamp(min=1e-30).log1p().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision=chosen.precision,
        scaler={"init_scale": 1.0} if chosen.precision == "fp16" else None,
    )
