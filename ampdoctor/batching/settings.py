"""What a framework's configuration says of the batch in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampdoctor.batching.gradient_shift import Reduction
from ampdoctor.evidence.targets import PlanFramework
from ampdoctor.scaling.trace import Division

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
