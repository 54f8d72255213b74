"""apex: its fused optimizers and norms are torch's own by now.

Under autocast apex's norms run in the half format, fp32 inside the kernel; torch's run in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ampdoctor.errors import ReplayError


class FusedAdam(torch.optim.AdamW):
    """Adam with decoupled weight decay, or without (`adam_w_mode=False`)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **_more: Any,
    ) -> None:
        if not bias_correction or amsgrad:
            raise ReplayError(
                "apex is not installed, and torch's Adam stands in for FusedAdam with bias_correction only"
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        if not adam_w_mode and weight_decay:
            for group in self.param_groups:
                if "decoupled_weight_decay" not in group:
                    raise ReplayError("apex is not installed, and this torch has no FusedAdam with adam_w_mode=False")
                group["decoupled_weight_decay"] = False


class FusedSGD(torch.optim.SGD):
    """SGD with momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **_more: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, fused=True)


def _operands(*tensors: Tensor | None) -> list[Tensor | None]:
    if not torch.is_autocast_enabled():
        return list(tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm in its input's format; under autocast in the half one."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Returns the input, normalised."""
        x, weight, bias = _operands(input, self.weight, self.bias)
        with torch.autocast("cuda", enabled=False):
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)  # type: ignore[arg-type]


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm in its input's format; under autocast in the half one."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input, normalised."""
        operand, weight = _operands(x, self.weight)
        with torch.autocast("cuda", enabled=False):
            return functional.rms_norm(operand, list(self.normalized_shape), weight, self.eps)  # type: ignore[arg-type]
