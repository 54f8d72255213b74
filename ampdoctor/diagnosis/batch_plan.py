"""Rules on a plan of the batch: no plan is exact, or none fits."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue import PLANNED, rule
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.report_plan import PlannedBatch, PlanSection
from ampdoctor.evidence.thresholds import Thresholds

NO_EXACT_PLAN = rule("AMP801", PLANNED)


@NO_EXACT_PLAN.judges(PlanSection)
def _no_exact_plan(section: PlanSection, _: Thresholds) -> Iterator[Finding]:
    if section.exact or not section.nearest:
        return
    batch, ranks = section.global_batch, section.after.data_parallel
    near = section.nearest[0]
    fewer = section.fewer
    help_ = (
        f"Train with {near.global_batch} and write that down; or, in a loop of your own, let ampdoctor.elastic_batch "
        "give ranks unequal shares and weigh their losses by them, which is exact."
    )
    if fewer is not None:
        idle = section.after.devices - fewer.devices
        help_ = f"Leave {idle} of {section.after.devices} devices idle: {product(fewer)} is exact. {help_}"
    yield NO_EXACT_PLAN.finding(
        "error",
        f"{ranks} data parallel ranks cannot share {batch} samples evenly ({batch} = {ranks} x "
        f"{batch // ranks} + {batch % ranks}); nearest is {product(near)}, off by {near.off:+d} "
        f"({near.off / batch:+.2%}).",
        where=Where(phase="data"),
        evidence={"global_batch": batch, "data_parallel": ranks, "nearest": near.global_batch, "off": near.off},
        advice=help_,
    )


def product(plan: PlannedBatch) -> str:
    """Formats a plan as a product."""
    return f"{plan.data_parallel} x {plan.micro_batch} x {plan.accumulation} = {plan.global_batch}"


NOTHING_FITS = rule("AMP802", PLANNED)


@NOTHING_FITS.judges(PlanSection)
def _nothing_fits(section: PlanSection, _: Thresholds) -> Iterator[Finding]:
    memory = section.memory
    if memory.max_micro_batch >= 1:
        return
    known = {"device_bytes": memory.device, "states_bytes": memory.states_after, "per_sample_bytes": memory.per_sample}
    yield NOTHING_FITS.finding(
        "error",
        f"Not even one sample fits a device of the new cluster: {memory.limited_by}.",
        where=Where(phase="forward"),
        evidence={key: value for key, value in known.items() if value is not None},
        advice="Cut more over the ranks that there are (a higher shard stage, tensor or pipeline parallelism), "
        "recompute activations, or offload the optimizer's states.",
    )
