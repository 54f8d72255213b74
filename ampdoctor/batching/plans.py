"""How one optimizer step's batch is cut into what a device sees at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ampdoctor.errors import UsageError
from ampdoctor.evidence.targets import PlanFramework
from ampdoctor.scaling.trace import Division


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


def exact_plans(global_batch: int, data_parallel: int, max_micro_batch: int) -> tuple[BatchPlan, ...]:
    """All plans whose product is `global_batch` exactly, the largest micro-batch first.

    There is none if `data_parallel` does not divide `global_batch`.
    """
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


# The devices of a job, and how many of them see other data.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, and the groups of them that work on the same samples.

    Expert parallelism takes its ranks from the data parallel ones and is not counted.

    Attributes:
        devices: All of them.
        tensor: Tensor parallel size.
        pipeline: Pipeline parallel size.
        context: Context (sequence) parallel size.
        per_node: Devices of a node; None if nobody has said.

    Raises:
        UsageError: A size below 1, or a product of parallel sizes that does not divide the devices.
    """

    devices: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    per_node: int | None = None

    def __post_init__(self) -> None:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        for name, size in sizes.items():
            if size < 1:
                raise UsageError(f"the {name} parallel size starts at 1, not {size}")
        if self.devices < 1:
            raise UsageError(f"a job needs at least 1 device, not {self.devices}")
        if self.devices % self.model_parallel:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise UsageError(
                f"{self.devices} devices are not divided by {product}"
                f"{f' = {self.model_parallel}' if ' x ' in product else ''}: data parallel = devices / (tp x pp x cp)"
            )

    @property
    def model_parallel(self) -> int:
        """Devices that work on the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_parallel(self) -> int:
        """Groups of devices that see other samples."""
        return self.devices // self.model_parallel

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO and FSDP cut states: context parallel ranks hold the same parameters, and share too."""
        return self.data_parallel * self.context

    def with_data_parallel(self, ranks: int) -> Cluster:
        """Returns a cluster of so many groups with the same parallel sizes."""
        return Cluster(
            devices=ranks * self.model_parallel,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            per_node=self.per_node,
        )


# Where no plan is exact: the plans of the nearest batches, and fewer ranks on which one is.


def nearest_plans(global_batch: int, data_parallel: int, max_micro_batch: int) -> tuple[BatchPlan, ...]:
    """Returns the plans of the nearest multiples of `data_parallel` below and above, nearest first.

    Of plans that are as far off, the one below comes first, then the larger micro-batch. Every batch that the ranks can
    share evenly is a multiple of their number: no other plan is nearer.
    """
    below = global_batch // data_parallel * data_parallel
    reachable = [batch for batch in (below, below + data_parallel) if batch]
    plans = [plan for batch in reachable for plan in exact_plans(batch, data_parallel, max_micro_batch)]
    return tuple(
        sorted(plans, key=lambda plan: (abs(plan.global_batch - global_batch), plan.global_batch, -plan.micro_batch))
    )


def most_ranks_that_divide(global_batch: int, data_parallel: int) -> int:
    """Returns the most data parallel ranks, up to `data_parallel`, that share the batch evenly."""
    return next(ranks for ranks in range(min(data_parallel, global_batch), 0, -1) if global_batch % ranks == 0)


# By how many binades (numbers of log2) the gradients of a backward pass move when a step's batch is cut anew.
#
# Sample i adds c g_i to the loss's gradient, and all that differs between plans is c and how many samples one backward
# sums. With m samples in a micro-batch and A of them before a step:
#
# | the loss                                        | c       | a sample's gradient | m that agree | m of noise    |
# | a mean over the micro-batch, divided by A       | 1/(m A) | 1/(m A)             | 1/A          | 1/(sqrt(m) A) |
# | tokens: a sum over the N tokens of all, times D | D/N     | 1/(m A)             | 1/A          | 1/(sqrt(m) A) |
# | step: a sum over the N tokens of all            | 1/N     | 1/N                 | m/N          | sqrt(m)/N     |
# | a sum that nothing divides                      | 1       | 1                   | m            | sqrt(m)       |
#
# An activation's gradient belongs to one sample. (BatchNorm mixes samples: its backward takes their mean over the
# micro-batch away from each, which is a sum of m over m.) A weight's gradient is summed over the micro-batch inside a
# single product, whose result is what fp16 has to hold: between m times a sample's (they all point one way) and sqrt(m)
# times it (they are independent; the usual case late in a training). N is m A D samples' tokens, hence the second line;
# in the third it is the same for every plan of a batch. What ranks divide by afterwards, in the reduce, is
# `scaling.shifts.reduction_shift`.


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


# What a framework's configuration says of the batch in force.


Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What is said of the batch, and of the devices that share it; None for what is not said.

    Attributes:
        framework: Whose configuration it is; None for the command line alone.
        global_batch: Samples of an optimizer step, where the framework is told: the product of the others may not be
            given in its place.
        micro_batch: Samples that a rank runs at once.
        accumulation: Micro-batches before a step.
        devices: All devices.
        tensor: Tensor parallel size.
        pipeline: Pipeline parallel size.
        context: Context parallel size.
        per_node: Devices of a node.
        shard_stage: As ZeRO counts them.
        within_node: Only the devices of a node share a copy of the states (FSDP's HYBRID_SHARD).
        precision: Of the run's computation.
        reduction: What its loss is divided by.
        division: When an fp16 reduce divides by the ranks; `none`: it is not in fp16.
        rounds_down: It trains with a smaller batch rather than refuse one that cannot be shared (Megatron-LM).
        fixed_total: The data loader's batch is that of all ranks (Accelerate's and Trainer's `split_batches`).
        filled: Sizes that are not given here are given elsewhere, and stay (DeepSpeed's "auto").
        peak_memory: Most bytes that a device of it has held, where it was measured.
        unmeasured: It is of a run's log, and its memory was not measured.
        notes: What else there is to say, a sentence each.
    """

    framework: PlanFramework | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    devices: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    per_node: int | None = None
    shard_stage: int | None = None
    within_node: bool = False
    precision: Precision | None = None
    reduction: Reduction | None = None
    division: Division | Literal["none"] | None = None
    rounds_down: bool = False
    fixed_total: bool = False
    filled: bool = False
    peak_memory: int | None = None
    unmeasured: bool = False
    notes: tuple[str, ...] = ()


# The plan that is in force, from as much of it as is said.


MAX_GLOBAL_BATCH = 1 << 24
"""Samples of a step: beyond it somebody has counted tokens."""
GIVEN = "micro-batch and accumulation as given"
DERIVED = "one of micro-batch and accumulation as given, and the other derived"
ASSUMED = "taken to be the largest micro-batch that fits and divides; --micro-batch says otherwise"


def in_force(said: BatchSettings, data_parallel: int | None, most: int | None) -> tuple[BatchPlan | None, str]:
    """Returns the plan before and where it is known from; None if nothing is said of a cluster before.

    Args:
        said: What is known of the batch.
        data_parallel: Ranks of the cluster before that see other samples.
        most: The largest micro-batch that fits a device there, if that is known.

    Raises:
        UsageError: What is said contradicts itself, or no plan on that cluster gives the batch.
    """
    _counted(said)
    if data_parallel is None:
        return None, ""
    micro, steps, batch = said.micro_batch, said.accumulation, said.global_batch
    if micro is not None and steps is not None:
        return _checked(BatchPlan(micro_batch=micro, accumulation=steps, data_parallel=data_parallel), batch), GIVEN
    if batch is None:
        raise UsageError(
            "the global batch is not known: --global-batch says it, or --micro-batch and --accumulation beside --gpus"
        )
    shared = f"{batch} samples over {data_parallel} data parallel ranks"
    if micro is not None:
        each, left = divmod(batch, data_parallel * micro)
        if left or not each:
            raise UsageError(f"{shared} are no whole number of micro-batches of {micro}: that is not what is in force")
        return BatchPlan(micro_batch=micro, accumulation=each, data_parallel=data_parallel), DERIVED
    if steps is not None:
        each, left = divmod(batch, data_parallel * steps)
        if left or not each:
            raise UsageError(f"{shared} are not cut into {steps} micro-batches evenly: that is not what is in force")
        return BatchPlan(micro_batch=each, accumulation=steps, data_parallel=data_parallel), DERIVED
    if batch % data_parallel:
        raise UsageError(
            f"{shared} are not even, which no job has in force: check --global-batch and --gpus, or leave --gpus "
            "out to plan for --to-gpus alone"
        )
    plans = exact_plans(batch, data_parallel, batch if most is None else most)
    if not plans:
        raise UsageError("not one sample fits a device of the job in force: check its memory, or say its --micro-batch")
    return plans[0], ASSUMED


def is_only_asked(said: BatchSettings, before: Cluster | None, after: Cluster) -> bool:
    """Whether nothing is in force: one cluster is named, nothing says how it cuts the batch, and it cannot evenly.

    Such a job there is not; somebody asks what this cluster can do.
    """
    cut = said.micro_batch is not None or said.accumulation is not None
    batch = said.global_batch
    return before == after and not cut and batch is not None and batch > 0 and batch % after.data_parallel > 0


def global_batch_of(said: BatchSettings, plan: BatchPlan | None) -> int:
    """Returns the batch that is to be kept.

    Raises:
        UsageError: Nobody has said it, or it counts tokens.
    """
    batch = said.global_batch if plan is None else plan.global_batch
    if batch is None:
        raise UsageError(
            "the global batch is not known: --global-batch says it, or --micro-batch and --accumulation beside --gpus"
        )
    return within_bounds(batch)


def within_bounds(batch: int) -> int:
    """Returns a global batch that can be one: of larger ones not even the divisors are asked.

    Raises:
        UsageError: It counts tokens.
    """
    if batch > MAX_GLOBAL_BATCH:
        raise UsageError(f"a global batch of {batch} is beyond {MAX_GLOBAL_BATCH}: it counts samples, not tokens")
    return batch


def _counted(said: BatchSettings) -> None:
    for name, value in (
        ("global batch", said.global_batch),
        ("micro-batch", said.micro_batch),
        ("accumulation", said.accumulation),
    ):
        if value is not None and value < 1:
            raise UsageError(f"the {name} starts at 1, not {value}")
    if said.global_batch is not None:
        within_bounds(said.global_batch)


def _checked(plan: BatchPlan, batch: int | None) -> BatchPlan:
    if batch is not None and plan.global_batch != batch:
        raise UsageError(
            f"{plan.micro_batch} x {plan.accumulation} x {plan.data_parallel} data parallel ranks = "
            f"{plan.global_batch}, and not the global batch of {batch}"
        )
    return plan


# What a device needs for a micro-batch: the states of its share of the parameters, and the samples.


ADAM_BYTES = (2, 2, 12)
"""Bytes of a parameter in mixed precision with Adam: half weight, half gradient, and in fp32 weight and two moments
(ZeRO, Rajbhandari et al. 2020, section 3.1: 2 + 2 + K with K = 12)."""
STAGES = (0, 1, 2, 3)
"""ZeRO's: nothing is cut; optimizer states; and gradients; and parameters, as FSDP's full shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The parameters, gradients and optimizer states of a model, and what of them is cut over the ranks.

    Attributes:
        parameters: Of the whole model.
        stage: ZeRO's stage; 0 also for DDP, 3 for FSDP's full shard.
        bytes_each: Bytes of a parameter's weight, gradient and optimizer states.
        within_node: Only the devices of a node share a copy, and each node has its own (FSDP's HYBRID_SHARD).
        node: So many devices are taken to be on a node of a cluster that does not say it; None: on one for all.

    Raises:
        UsageError: No parameters, a stage that there is not, or bytes that are negative or not to be counted.
    """

    parameters: float
    stage: int = 0
    bytes_each: tuple[float, float, float] = ADAM_BYTES
    within_node: bool = False
    node: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.parameters < math.inf:
            raise UsageError(f"a model has at least 1 parameter, not {self.parameters:g}")
        if self.stage not in STAGES:
            raise UsageError(f"there is no shard stage {self.stage}: 0 (DDP), 1, 2 or 3 (ZeRO-3, FSDP)")
        if not all(0 <= each < math.inf for each in self.bytes_each):
            raise UsageError("the bytes of a parameter are finite, and not negative")
        if not math.isfinite(self.parameters * sum(self.bytes_each)):
            raise UsageError("the bytes of all parameters are more than can be counted: check --params, --state-bytes")

    def on(self, cluster: Cluster) -> float:
        """Returns the bytes on each device: tensor and pipeline parallel ranks cut the model, shards cut its states.

        Embeddings that pipeline stages hold twice, and what is gathered for a while, are not counted.
        """
        weight, gradient, moments = self.bytes_each
        cut = {1: moments, 2: gradient + moments, 3: weight + gradient + moments}.get(self.stage, 0.0)
        whole = weight + gradient + moments - cut
        return self.parameters / (cluster.tensor * cluster.pipeline) * (whole + cut / self._shards(cluster))

    def _shards(self, cluster: Cluster) -> int:
        node = cluster.per_node or self.node if self.within_node else None
        if node is None:
            return cluster.shards
        return max(1, min(cluster.shards, node // (cluster.tensor * cluster.pipeline)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is known of a device's memory, in bytes; None for what is not.

    Attributes:
        per_sample: What one more sample of the micro-batch takes.
        device: What there is.
        states: What is there whatever the micro-batch.
        known_to_fit: The largest micro-batch that is known to fit on the cluster before.
    """

    per_sample: float | None = None
    device: float | None = None
    states: States | None = None
    known_to_fit: int | None = None

    def needs(self, micro_batch: int, cluster: Cluster) -> float | None:
        """Returns the bytes that a micro-batch needs on each device; None if no sample's size is known."""
        if self.per_sample is None:
            return None
        return micro_batch * self.per_sample + (0.0 if self.states is None else self.states.on(cluster))

    def most(self, before: Cluster | None, after: Cluster) -> int | None:
        """Returns the largest micro-batch that fits after; None if nothing says so.

        The device's own memory says so, and so does what is known to fit before: it still does but for the samples
        whose room larger shards have taken. Both hold, and the smaller counts.
        """
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
        """Returns how many samples the states' growth takes at most; 0 if it is not known what a sample takes."""
        grown = self.growth(before, after)
        return math.ceil(grown / self.per_sample) if self.per_sample is not None and grown > 0 else 0


def per_sample_of_peak(peak: float, micro_batch: int, states: States | None, cluster: Cluster) -> float:
    """Returns the bytes of a sample from the peak memory of a measured run: at most what is left beside the states.

    Raises:
        UsageError: The states alone are larger than the peak: they are not those of the run that was measured.
    """
    beside = peak - (0.0 if states is None else states.on(cluster))
    if beside <= 0:
        raise UsageError(
            f"the states alone take {(peak - beside) / 1e9:.3g} GB of a device, more than the measured peak of "
            f"{peak / 1e9:.3g} GB: check --params, --shard-stage and --state-bytes"
        )
    return beside / micro_batch


# What `plan` is asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A batch, the cluster that it is to be cut for, and what is known of both.

    Attributes:
        read: What a configuration says of the batch in force.
        said: The same, with what the command line says in its place.
        before: The cluster in force; None if nothing is said of one.
        after: The cluster to plan for.
        memory: What is known of a device's memory.
        samples: Of an epoch; None if nobody has said.
        emit: In whose words the plan is wanted.
        profile: File of a saved profile.
        scale: The loss scale of now, for a profile whose run has none of its own.
        config: File of the configuration that was read.
    """

    read: BatchSettings = field(default_factory=BatchSettings)
    said: BatchSettings
    before: Cluster | None
    after: Cluster
    memory: Memory = field(default_factory=Memory)
    samples: int | None = None
    emit: PlanFramework | None = None
    profile: str | None = None
    scale: float | None = None
    config: str | None = None
