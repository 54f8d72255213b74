"""`Guard`: lets a fused optimizer hold a sick update back by itself, on its device."""

from __future__ import annotations

from typing import Any

import torch

from ampdoctor.hooks.process_state import are_several
from ampdoctor.hooks.torch_internals import unseen

_FLAG, _SCALE = "found_inf", "grad_scale"
"""What a fused optimizer asks itself for, and a GradScaler sets: where the flag is not 0, parameters, moments and the
count of steps stay as they are."""


class Guard:
    """Sets the flag of an optimizer before its step, and takes it away afterwards; nothing waits for a device."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor], norm: torch.Tensor | None) -> bool:
        """Let the next step be held back if its numbers are not finite.

        Args:
            optimizer: About to step without a scaler.
            losses: What its gradients come of; not looked at where several processes share a step, which would then
                decide apart.
            norm: Of its gradients.

        Returns:
            Whether it can: it is fused, its gradients have a norm of their own, and no part of them lies elsewhere.
        """
        self.release()
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, _FLAG) or norm is None:
            return False
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(hasattr(gradient, "to_local") for gradient in held):
            return False
        with unseen(), torch.no_grad():
            sick = norm.isfinite().logical_not()
            for loss in () if are_several() else losses:
                if loss.device == sick.device:
                    sick = sick | loss.isfinite().all().logical_not()
            flag = sick.to(torch.float32)
        setattr(optimizer, _FLAG, flag)
        setattr(optimizer, _SCALE, None)
        self._held.append(optimizer)
        return True

    def release(self) -> None:
        """Take the flag away."""
        while self._held:
            optimizer = self._held.pop()
            for name in (_FLAG, _SCALE):
                vars(optimizer).pop(name, None)
