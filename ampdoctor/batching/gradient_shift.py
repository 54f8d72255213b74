"""By how many binades (numbers of log2) the gradients of a backward pass move when a step's batch is cut anew.

Sample i adds c g_i to the loss's gradient, and all that differs between plans is c and how many samples one backward
sums. With m samples in a micro-batch and A of them before a step:

| the loss                                        | c       | a sample's gradient | m that agree | m of noise    |
| a mean over the micro-batch, divided by A       | 1/(m A) | 1/(m A)             | 1/A          | 1/(sqrt(m) A) |
| tokens: a sum over the N tokens of all, times D | D/N     | 1/(m A)             | 1/A          | 1/(sqrt(m) A) |
| step: a sum over the N tokens of all            | 1/N     | 1/N                 | m/N          | sqrt(m)/N     |
| a sum that nothing divides                      | 1       | 1                   | m            | sqrt(m)       |

An activation's gradient belongs to one sample. (BatchNorm mixes samples: its backward takes their mean over the
micro-batch away from each, which is a sum of m over m.) A weight's gradient is summed over the micro-batch inside a
single product, whose result is what fp16 has to hold: between m times a sample's (they all point one way) and sqrt(m)
times it (they are independent; the usual case late in a training). N is m A D samples' tokens, hence the second line;
in the third it is the same for every plan of a batch.
What ranks divide by afterwards, in the reduce, is `scaling.shifts.reduction_shift`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ampdoctor.batching.batch_plan import BatchPlan

Reduction = Literal["mean", "sum", "tokens", "step"]
"""What the loss of a backward is: a mean over the micro-batch that is then divided by the accumulation; a sum that
nothing divides (Megatron's per-token loss, which divides the gradients at the end); a sum over the tokens of the whole
optimizer step, divided by their number, for a reduce that takes the mean over the ranks (transformers since 4.46) or,
`step`, for one that adds them up (torchtitan since 0.2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShift:
    """Binades by which gradients become smaller, and by which the scale that serves them rises; below 0: larger.

    Attributes:
        activation: Of activation gradients; exact for each sample.
        weight: Of the weight gradients that one backward delivers, where the samples' gradients agree.
        weight_noise: Of the same where they are independent. What is real lies between the two; both are equal if the
            micro-batch stays.
    """

    activation: float
    weight: float
    weight_noise: float

    @property
    def activation_mixed(self) -> float:
        """Of what BatchNorm adds to each activation gradient, as far as it is the mean of independent samples."""
        return self.activation + (self.activation - self.weight) / 2.0

    @property
    def weight_least(self) -> float:
        """The smaller of the two of weight gradients: they are then largest, which is what an overflow asks."""
        return min(self.weight, self.weight_noise)

    @property
    def weight_most(self) -> float:
        """The larger of the two: they are then smallest, which is what underflow asks."""
        return max(self.weight, self.weight_noise)


def gradient_shift(before: BatchPlan, after: BatchPlan, reduction: Reduction = "mean") -> GradientShift:
    """Returns the shift from one plan to another; the number of ranks moves nothing beyond what it does to m and A.

    For a mean, activation gradients shift by log2(m'A' / (m A)), which is the same for all exact plans of a cluster
    (m A = global batch / ranks), and weight gradients that agree by log2(A' / A).

    Args:
        before: The plan whose gradients are known.
        after: The plan that is asked about.
        reduction: What the loss is divided by.
    """
    old, new = _divisor(before, reduction), _divisor(after, reduction)
    activation = math.log2(new / old)
    weight = math.log2((new * before.micro_batch) / (old * after.micro_batch))
    return GradientShift(activation=activation, weight=weight, weight_noise=(activation + weight) / 2.0)


def _divisor(plan: BatchPlan, reduction: Reduction) -> int:
    """Returns 1/c, up to a factor that plans share."""
    if reduction == "sum":
        return 1
    return plan.global_batch if reduction == "step" else plan.micro_batch * plan.accumulation
