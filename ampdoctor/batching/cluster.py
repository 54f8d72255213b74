"""The devices of a job, and how many of them see other data."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.errors import UsageError


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
