"""AMP802: not even one sample fits a device of the new cluster."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import PLANNED, register
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP802",
    "nothing-fits",
    "Not even a micro-batch of one sample fits a device",
    worst="error",
    commands=PLANNED,
)


@RULE.judges(PlanSection)
def _nothing_fits(section: PlanSection, _: Thresholds) -> Iterator[Finding]:
    memory = section.memory
    if memory.max_micro_batch >= 1:
        return
    known = {
        "device_bytes": memory.device,
        "states_bytes": memory.states_after,
        "per_sample_bytes": memory.per_sample,
    }
    yield Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        message=f"Not even one sample fits a device of the new cluster: {memory.limited_by}.",
        where=Where(phase="forward"),
        evidence={key: value for key, value in known.items() if value is not None},
        help="Cut more over the ranks that there are (a higher shard stage, tensor or pipeline parallelism), recompute "
        "activations, or offload the optimizer's states.",
    )
