"""What half products, convolutions and attention give on the device, beside the detour on the CPU.

The CPU multiplies through fp32 kernels and rounds once; attention rounds what flash attention rounds inside. Whether a
value is born non-finite has to be the same; a value on the edge of fp16's range may fall to either side. Without a GPU
the CPU's own kernels stand in for it, but not for transposed convolutions, whose partial sums they round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ampdoctor.precision.fp16_matmul import half_products
from benchmarks.gpu_check.section import Section

Question = Callable[[torch.device], Sequence[Tensor]]
EDGE = 0.02
"""Share of a tensor's elements that may be finite on one side only."""


def measure(device: torch.device) -> Section:
    """Ask every question on the device and of the detour."""
    left_out = [name for name in questions() if device.type == "cpu" and name.startswith("conv_transpose2d")]
    rows = {name: counted(ask(device)) for name, ask in questions().items() if name not in left_out}
    skipped = tuple(f"{name}: a CPU rounds its partial sums" for name in left_out)
    return Section(rows=rows, differences=tuple(differences(rows)), skipped=skipped)


def differences(rows: dict[str, list[list[int]]]) -> Iterable[str]:
    """A sentence for each answer that is not the detour's.

    Args:
        rows: Of each result of a question its elements, NaNs and infinities.
    """
    known = questions()
    for name, row in rows.items():
        with half_products():
            ours = counted(known[name](torch.device("cpu")))
        for index, (there, here) in enumerate(zip(row, ours, strict=True)):
            apart = max(abs(one - other) for one, other in zip(there[1:], here[1:], strict=True))
            if apart > EDGE * there[0]:
                yield (
                    f"{name}, result {index}: {there[1]} NaN and {there[2]} infinite of {there[0]} on the device, "
                    f"{here[1]} and {here[2]} here"
                )


def counted(results: Sequence[Tensor]) -> list[list[int]]:
    """Of each result its elements, NaNs and infinities."""
    return [[one.numel(), int(one.isnan().sum()), int(one.isinf().sum())] for one in results]


def questions() -> dict[str, Question]:
    """What is asked, by name: the values are made on the CPU and are the same on every machine."""
    asked: dict[str, Question] = {}
    for scale in (1.0, 100.0, 300.0):
        asked[f"mm, x {scale:g}"] = _with_gradients(torch.mm, (96, 200), (200, 64), scale)
        asked[f"conv2d, x {scale:g}"] = _with_gradients(_convolved, (2, 8, 12, 12), (16, 8, 3, 3), scale)
        asked[f"conv_transpose2d, x {scale:g}"] = _with_gradients(_transposed, (2, 8, 12, 12), (8, 16, 3, 3), scale)
    for scale in (1e-3, 1.0, 30.0, 100.0, 300.0):
        for causal in (False, True):
            asked[f"attention{' causal' if causal else ''}, x {scale:g}"] = _attention(scale, causal=causal)
    return asked


def _convolved(source: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(source, weight, padding=1)


def _transposed(source: Tensor, weight: Tensor) -> Tensor:
    return functional.conv_transpose2d(source, weight, stride=2, padding=1)


def _made(generator: torch.Generator, shape: Sequence[int], scale: float, device: torch.device) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).half().to(device).requires_grad_()


def _with_gradients(op: Callable[..., Tensor], *shapes_and_scale: object) -> Question:
    *shapes, scale = shapes_and_scale

    def ask(device: torch.device) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(0)
        leaves = [_made(generator, shape, float(scale), device) for shape in shapes]  # type: ignore[arg-type]
        result = op(*leaves)
        given = torch.randn(result.shape, generator=generator).half().to(device)
        return result.detach(), *torch.autograd.grad(result, leaves, given)

    return ask


def _attention(scale: float, *, causal: bool) -> Question:
    def ask(device: torch.device) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(0)
        leaves = [_made(generator, (2, 4, 128, 64), scale, device) for _ in range(3)]
        result = functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        given = torch.randn(result.shape, generator=generator).half().to(device)
        return result.detach(), *torch.autograd.grad(result, leaves, given)

    return ask
