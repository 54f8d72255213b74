"""Accelerate puts autocast inside a model's forward: a call that was recorded from outside then computes in another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.nested import map_tensors
from ampdoctor.hooks.program import Call, Mode, Program

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def with_inner_autocast(program: Program) -> Program:
    """Returns the program, with the calls of models that Accelerate has prepared under its autocast."""
    prepared = prepared_models(program.model)
    if not prepared:
        return program
    cast = _cast(program.model)
    if cast is None:
        return program

    def under(one: Any) -> Any:
        if not isinstance(one, Call) or one.mode.autocast is not None or one.model not in prepared:
            return one
        return replace(one, mode=Mode(autocast=cast, cached=one.mode.cached, gradients=one.mode.gradients))

    return replace(program, instructions=tuple(map(under, program.instructions)))


def prepared_models(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the modules whose forward Accelerate has wrapped: their outputs are converted to fp32."""
    return tuple(name for name, part in model.named_modules() if "_original_forward" in vars(part))


def _cast(model: nn.Module) -> tuple[str, torch.dtype] | None:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: Mapping[str, Any] = getattr(state, "_shared_state", {})
    dtype = _DTYPES.get(str(shared.get("_mixed_precision")))
    device = next((p.device.type for p in model.parameters()), "cpu")
    return None if dtype is None else (device if device in ("cpu", "cuda") else "cpu", dtype)


def converts_outputs(model: nn.Module) -> None:
    """Let a fresh model give its outputs in fp32, as Accelerate's wrapper does."""
    model.register_forward_hook(_converted)


def _converted(_module: nn.Module, _args: Any, output: Any) -> Any:
    return map_tensors(lambda one: one.float() if one.dtype in (torch.float16, torch.bfloat16) else one, output)
