"""What `plan` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampdoctor.batching.cluster import Cluster
from ampdoctor.batching.memory import Memory
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.evidence.targets import PlanFramework


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
