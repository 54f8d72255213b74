"""What a device needs for a micro-batch: the states of its share of the parameters, and the samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampdoctor.batching.cluster import Cluster
from ampdoctor.errors import UsageError

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
