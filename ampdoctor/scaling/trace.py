"""What each recorded step says to a loss scaler, as arrays: all that a simulation needs of a profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXPONENTS = np.arange(-10, 33)
"""log2 of the loss scales at which a profile keeps its curves: 2^-10 to 2^32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """n recorded steps, in order; gradients are of the unscaled loss.

    Attributes:
        log2_amax: float64 of shape (n,): log2 of the largest magnitude of all half gradients; -inf where all were
            zero, +inf where one was not finite at any scale. A step overflows at the scale S iff amax S >= 65520.
        error: float64 of shape (n, 43): relative L2 error of the half weight gradients after rounding to fp16 at each
            of the scales 2^EXPONENTS; inf where something overflows; 0 where there is no nonzero gradient.
        activation_flushed: float64 of shape (n, 43): share (0 to 1) of the nonzero elements of half activation
            gradients that becomes zero at each scale.
        weight_flushed: The same for weight gradients.
    """

    log2_amax: NDArray[np.float64]
    error: NDArray[np.float64]
    activation_flushed: NDArray[np.float64]
    weight_flushed: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """N."""
        return len(self.log2_amax)
