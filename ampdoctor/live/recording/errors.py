"""What an error that has ended a step tells of numbers: by its text, and by the tensors in the frames behind it."""

from __future__ import annotations

import itertools
import math
import re
import traceback
from collections.abc import Iterator

import torch

from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.numerics.tensors import is_plain

_ABOUT_NUMBERS = re.compile(
    r"\b(nan|nans|inf|infs|infinity|infinite|nonfinite|finite|overflow(s|ed)?|diverged?|probability|cholesky)\b"
    r"|invalid (numeric|values?)|numeric(al)?ly|constraint|positive-definite|singular|converge",
    re.IGNORECASE,
)
"""Words of what torch, SciPy, NumPy and loops say about numbers that are not finite: `torch.multinomial`,
`torch.distributions`, `linear_sum_assignment`, `torch.linalg`, and checks by hand."""
_MOST = 64
"""Items of a list or a dict that are looked at."""


def is_about_numbers(error: BaseException) -> bool:
    """Whether an error, or what it came of, is one of arithmetic or speaks of numbers."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, ArithmeticError) or _ABOUT_NUMBERS.search("".join(traceback.format_exception_only(one))):
            return True
        one = one.__cause__ or one.__context__
    return False


def holds_nonfinite(error: BaseException) -> bool:
    """Whether a tensor in a variable of a frame that an error has left is not finite. A device is waited for."""
    return any(is_lost(tensor, signed=False) for tensor in _of_frames(error))


def is_lost(tensor: torch.Tensor, *, signed: bool) -> bool:
    """Whether a tensor holds NaN or +Inf.

    Args:
        tensor: Any.
        signed: -Inf counts as well, which masks are made of.
    """
    if not is_plain(tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or not tensor.numel():
        return False
    with unseen():
        low, high = torch.aminmax(tensor.detach())
        return not bool(high < math.inf) or (signed and not bool(low.isfinite()))


def _of_frames(error: BaseException) -> Iterator[torch.Tensor]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_locals is frame.f_globals:  # a script's variables, of which the tape knows those that count
            continue
        for value in list(frame.f_locals.values()):
            inner = value.values() if isinstance(value, dict) else value
            inner = inner if isinstance(value, dict | list | tuple) else (value,)
            yield from (one for one in itertools.islice(inner, _MOST) if isinstance(one, torch.Tensor))
