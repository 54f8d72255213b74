"""How an optimizer step's batch is split into micro-batches, accumulation and ranks; and what is known of the job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report_plan import PlannedBatch, PlannedCluster
from ampdoctor.evidence.targets import PlanFramework


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`data_parallel` ranks, each of which runs `accumulation` micro-batches of `micro_batch` samples before a step."""

    micro_batch: int
    accumulation: int
    data_parallel: int

    @property
    def global_batch(self) -> int:
        """The samples of one optimizer step."""
        return self.micro_batch * self.accumulation * self.data_parallel


AnyPlan: TypeAlias = BatchPlan | PlannedBatch


def exact_plans(global_batch: int, data_parallel: int, max_micro_batch: int) -> tuple[BatchPlan, ...]:
    """Returns all plans whose product is `global_batch` exactly, the largest micro-batch first."""
    each, left = divmod(global_batch, data_parallel)
    if left:
        return ()
    small = [size for size in range(1, math.isqrt(each) + 1) if each % size == 0]
    sizes = sorted({*small, *(each // size for size in small)}, reverse=True)
    return tuple(
        BatchPlan(micro_batch=micro, accumulation=each // micro, data_parallel=data_parallel)
        for micro in sizes
        if micro <= max_micro_batch
    )


# -- the devices of a job --


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(PlannedCluster):
    """Devices, and their groups that work on the same samples; raises UsageError for sizes that do not fit together.

    Expert parallelism takes its ranks from the data parallel ones and is not counted.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data_parallel: int = field(init=False)  # groups of devices with different samples

    def __post_init__(self) -> None:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        if self.devices % self.model_parallel:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise UsageError(
                f"{self.devices} devices are not divided by {product}"
                f"{f' = {self.model_parallel}' if ' x ' in product else ''}: data parallel = devices / (tp x pp x cp)"
            )
        object.__setattr__(self, "data_parallel", self.devices // self.model_parallel)

    @property
    def model_parallel(self) -> int:
        """Devices that work on the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO and FSDP shard states, with context parallel ranks, which hold the same parameters."""
        return self.data_parallel * self.context

    def with_data_parallel(self, ranks: int) -> Cluster:
        """Returns a cluster of so many groups with the same parallel sizes."""
        return replace(self, devices=ranks * self.model_parallel)


# -- where no plan is exact --


def nearest_plans(global_batch: int, data_parallel: int, max_micro_batch: int) -> tuple[BatchPlan, ...]:
    """Returns the plans of the multiples of `data_parallel` below and above, nearest first; no other is nearer."""
    below = global_batch // data_parallel * data_parallel
    reachable = [batch for batch in (below, below + data_parallel) if batch]
    plans = [plan for batch in reachable for plan in exact_plans(batch, data_parallel, max_micro_batch)]
    return tuple(
        sorted(plans, key=lambda plan: (abs(plan.global_batch - global_batch), plan.global_batch, -plan.micro_batch))
    )


def most_ranks_that_divide(global_batch: int, data_parallel: int) -> int:
    """Returns the most data parallel ranks, up to `data_parallel`, that share the batch evenly."""
    return next(ranks for ranks in range(min(data_parallel, global_batch), 0, -1) if global_batch % ranks == 0)


# -- the shift (log2) of a backward's gradients under another plan --
#
# Sample i adds c g_i to the loss's gradient. Plans differ only in c and in the number of samples that one backward
# sums. With m samples in a micro-batch and A of them before a step:
#
# | the loss                                        | c       | a sample's gradient | m that agree | m of noise    |
# | a mean over the micro-batch, divided by A       | 1/(m A) | 1/(m A)             | 1/A          | 1/(sqrt(m) A) |
# | tokens: a sum over the N tokens of all, times D | D/N     | 1/(m A)             | 1/A          | 1/(sqrt(m) A) |
# | step: a sum over the N tokens of all            | 1/N     | 1/N                 | m/N          | sqrt(m)/N     |
# | a sum that nothing divides                      | 1       | 1                   | m            | sqrt(m)       |
#
# An activation's gradient belongs to one sample (what BatchNorm mixes into it shrinks more). A weight's gradient is
# summed over the micro-batch inside a single product, whose result fp16 has to hold: between m times a sample's (they
# all point one way) and sqrt(m) times it (they are independent; the usual case late in a training). N is m A D samples'
# tokens, hence the second line; in the third it is the same for every plan of a batch.


Reduction = Literal["mean", "sum", "tokens", "step"]
"""The loss of a backward: a mean over the micro-batch, divided by the accumulation; a sum that nothing divides
(Megatron's per-token loss, which divides the gradients at the end); a sum over the tokens of the whole optimizer step,
divided by their number, for a reduce that takes the mean over the ranks (transformers since 4.46) or, `step`, for a
reduce that adds them up (torchtitan since 0.2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShift:
    """log2 of the factor by which gradients become smaller; weight gradients lie between the two figures."""

    activation: float  # of activation gradients; exact for each sample
    weight: float  # of the weight gradients of one backward, where the samples' gradients agree
    weight_noise: float  # the same where they are independent

    @property
    def weight_least(self) -> float:
        """The smaller value for weight gradients, which are then largest: for overflow."""
        return min(self.weight, self.weight_noise)

    @property
    def weight_most(self) -> float:
        """The larger value for weight gradients, which are then smallest: for underflow."""
        return max(self.weight, self.weight_noise)


def gradient_shift(before: AnyPlan, after: AnyPlan, reduction: Reduction = "mean") -> GradientShift:
    """Returns the shift from one plan to another; the number of ranks only matters through m and A.

    For a mean, activation gradients shift by log2(m'A' / (m A)), which is the same for all exact plans of a cluster
    (m A = global batch / ranks), and weight gradients that agree by log2(A' / A).
    """
    old, new = _divisor(before, reduction), _divisor(after, reduction)
    activation = math.log2(new / old)
    weight = math.log2((new * before.micro_batch) / (old * after.micro_batch))
    return GradientShift(activation=activation, weight=weight, weight_noise=(activation + weight) / 2.0)


def _divisor(plan: AnyPlan, reduction: Reduction) -> int:
    """Returns 1/c, up to a factor that plans share."""
    if reduction == "sum":
        return 1
    return plan.global_batch if reduction == "step" else plan.micro_batch * plan.accumulation


# -- the batch in force, as a framework's configuration gives it --


Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
GradReduceScaling = Literal["before", "after", "split"]
"""When a reduction over n ranks divides by n: before the sum (DDP's fp16_compress_hook, prescale_gradients), after it
(DeepSpeed's default), or about sqrt(n) on each side (FSDP1, FSDP2 with reduce_dtype=fp16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What is given about the batch and the devices; None for everything that is not given."""

    framework: PlanFramework | None = None  # the configuration's; None for the command line alone
    global_batch: int | None = None  # samples of an optimizer step; only as given, never the product of the others
    micro_batch: int | None = None
    accumulation: int | None = None
    devices: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    shard_stage: int | None = None  # as in ZeRO
    precision: Precision | None = None
    reduction: Reduction | None = None
    division: GradReduceScaling | Literal["none"] | None = None  # of an fp16 reduce; `none`: it is not in fp16
    peak_memory: int | None = None  # largest measured number of bytes on a device
    notes: tuple[str, ...] = ()  # further remarks, a sentence each

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "accumulation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"the {name.replace('_', ' ')} starts at 1, not {value}")
        if self.global_batch is not None:
            within_bounds(self.global_batch)


# -- the plan in force, from what is given --


MAX_GLOBAL_BATCH = 1 << 24  # samples of a step: more are counted in tokens
GIVEN = "micro-batch and accumulation as given"
DERIVED = "one of micro-batch and accumulation as given, and the other derived"
ASSUMED = "taken to be the largest micro-batch that fits and divides; --micro-batch says otherwise"
_NO_BATCH = "the global batch is not known: --global-batch says it, or --micro-batch and --accumulation beside --gpus"


def current_plan(said: BatchSettings, data_parallel: int | None, most: int | None) -> tuple[BatchPlan | None, str]:
    """Returns the plan in force, and how it is known; None if no cluster before is given.

    `data_parallel` counts the ranks before, and `most` is the largest micro-batch that fits there, if known.
    """
    micro, steps, batch = said.micro_batch, said.accumulation, said.global_batch
    if data_parallel is None:
        return None, ""
    if micro is not None and steps is not None:
        plan = BatchPlan(micro_batch=micro, accumulation=steps, data_parallel=data_parallel)
        if batch not in (None, plan.global_batch):
            raise UsageError(
                f"{micro} x {steps} x {data_parallel} data parallel ranks = {plan.global_batch}, and not the global "
                f"batch of {batch}"
            )
        return plan, GIVEN
    if batch is None:
        raise UsageError(_NO_BATCH)
    shared = f"{batch} samples over {data_parallel} data parallel ranks"
    known = micro or steps
    if known is not None:
        each, left = divmod(batch, data_parallel * known)
        if left or not each:
            what = f"whole number of micro-batches of {micro}" if micro is not None else f"{steps} even micro-batches"
            raise UsageError(f"{shared} are no {what}: that is not what is in force")
        sizes = (micro, each) if micro is not None else (each, known)
        return BatchPlan(micro_batch=sizes[0], accumulation=sizes[1], data_parallel=data_parallel), DERIVED
    if batch % data_parallel:
        raise UsageError(
            f"{shared} are not even, which no job has in force: check --global-batch and --gpus, or leave --gpus "
            "out to plan for --to-gpus alone"
        )
    plans = exact_plans(batch, data_parallel, batch if most is None else most)
    if not plans:
        raise UsageError("not one sample fits a device of the job in force: check its memory, or say its --micro-batch")
    return plans[0], ASSUMED


def global_batch_of(said: BatchSettings, plan: BatchPlan | None) -> int:
    """Returns the batch to keep; raises UsageError if it is not given, or counts tokens."""
    batch = said.global_batch if plan is None else plan.global_batch
    if batch is None:
        raise UsageError(_NO_BATCH)
    return within_bounds(batch)


def within_bounds(batch: int) -> int:
    """Returns a plausible global batch; raises UsageError for one in tokens, before its divisors are computed."""
    if batch > MAX_GLOBAL_BATCH:
        raise UsageError(f"a global batch of {batch} is beyond {MAX_GLOBAL_BATCH}: it counts samples, not tokens")
    return batch


# -- memory of a device: the states of its share of the parameters, and the samples --


ADAM_BYTES = (2, 2, 12)
"""Bytes of a parameter in mixed precision with Adam: half weight, half gradient, and in fp32 weight and two moments
(ZeRO, Rajbhandari et al. 2020, section 3.1: 2 + 2 + K with K = 12)."""
MOST_BYTES = 1000
STAGES = (0, 1, 2, 3)
"""ZeRO's: nothing is sharded; optimizer states; also gradients; also parameters, as FSDP's full shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The parameters, gradients and optimizer states of a model, and which are sharded; UsageError for nonsense."""

    parameters: float  # of the whole model
    stage: int = 0  # ZeRO's; 0 also for DDP, 3 for FSDP's full shard
    bytes_each: tuple[float, float, float] = ADAM_BYTES  # of a parameter's weight, gradient and optimizer states

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise UsageError(f"there is no shard stage {self.stage}: 0 (DDP), 1, 2 or 3 (ZeRO-3, FSDP)")
        if not all(0 <= each <= MOST_BYTES for each in self.bytes_each):
            raise UsageError(f"the bytes of a parameter are 0 to {MOST_BYTES}")

    def on(self, cluster: Cluster) -> float:
        """Returns the bytes on each device: tensor and pipeline parallel ranks cut the model, shards cut its states.

        Not counted: embeddings that pipeline stages hold twice, and what is gathered temporarily.
        """
        weight, gradient, moments = self.bytes_each
        cut = {1: moments, 2: gradient + moments, 3: weight + gradient + moments}.get(self.stage, 0.0)
        whole = weight + gradient + moments - cut
        return self.parameters / (cluster.tensor * cluster.pipeline) * (whole + cut / cluster.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A device's memory in bytes, as far as it is known."""

    per_sample: float | None = None  # of one more sample of the micro-batch
    device: float | None = None  # capacity
    states: States | None = None  # whatever the micro-batch
    known_to_fit: int | None = None  # largest micro-batch that is known to fit on the cluster before

    def needs(self, micro_batch: int, cluster: Cluster) -> float | None:
        """Returns the bytes that a micro-batch needs on each device; None if no sample's size is known."""
        if self.per_sample is None:
            return None
        return micro_batch * self.per_sample + (0.0 if self.states is None else self.states.on(cluster))

    def most(self, before: Cluster | None, after: Cluster) -> int | None:
        """Returns the largest micro-batch that fits after: by memory and by what fits before, the smaller."""
        found: list[int] = []
        if self.per_sample is not None and self.device is not None:
            left = self.device - (0.0 if self.states is None else self.states.on(after))
            found.append(max(0, math.floor(left / self.per_sample)))
        if self.known_to_fit is not None:
            found.append(max(0, self.known_to_fit - self.lost_samples(before, after)))
        return min(found, default=None)

    def growth(self, before: Cluster | None, after: Cluster) -> float:
        """Returns by how many bytes the states of a device grow; below 0: they shrink."""
        if self.states is None or before is None:
            return 0.0
        return self.states.on(after) - self.states.on(before)

    def lost_samples(self, before: Cluster | None, after: Cluster) -> int:
        """Returns how many samples the states' growth takes at most; 0 if a sample's size is not known."""
        grown = self.growth(before, after)
        return math.ceil(grown / self.per_sample) if self.per_sample is not None and grown > 0 else 0


def per_sample_of_peak(peak: float, micro_batch: int, states: States | None, cluster: Cluster) -> float:
    """Returns the bytes of a sample: of the measured peak, at most the rest beside the states; may raise UsageError."""
    beside = peak - (0.0 if states is None else states.on(cluster))
    if beside <= 0:
        raise UsageError(
            f"the states alone take {(peak - beside) / 1e9:.3g} GB of a device, more than the measured peak of "
            f"{peak / 1e9:.3g} GB: check --params, --shard-stage and --state-bytes"
        )
    return beside / micro_batch


# -- the request of `plan` --


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A batch, the cluster to plan for, and what is known of both."""

    said: BatchSettings  # the batch in force: of the configuration, overridden by the command line
    before: Cluster | None  # the cluster in force, if one is given
    after: Cluster
    memory: Memory = field(default_factory=Memory)
    emit: PlanFramework | None = None  # the framework whose settings are wanted
    profile: str | None = None  # file of a saved profile
    config: str | None = None  # file of the configuration
