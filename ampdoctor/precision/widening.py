"""Casts to half that are written in user code, made wide: for a reference that is fp32 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.precision.nested import REDUCED


class WideCasts(TorchDispatchMode):
    """Every op that is told to make float16 or bfloat16 makes float32: `x.half()`, `x.to(torch.bfloat16)`, `zeros`.

    FP8 stays as it is: there is no arithmetic in it, so that a cast to it is part of what is computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") in REDUCED:
            options["dtype"] = torch.float32
        return func(*args, **options)
