"""AMP801: no plan gives exactly the global batch that is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import PLANNED, register
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.report_plan import PlannedBatch, PlanSection
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP801",
    "no-exact-plan",
    "No micro-batch and accumulation give the global batch on this cluster",
    worst="error",
    commands=PLANNED,
)


@RULE.judges(PlanSection)
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
    yield Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        message=f"{ranks} data parallel ranks cannot share {batch} samples evenly ({batch} = {ranks} x "
        f"{batch // ranks} + {batch % ranks}); nearest is {product(near)}, off by {near.off:+d} "
        f"({near.off / batch:+.2%}).",
        where=Where(phase="data"),
        evidence={"global_batch": batch, "data_parallel": ranks, "nearest": near.global_batch, "off": near.off},
        help=help_,
    )


def product(plan: PlannedBatch) -> str:
    """A plan as its product."""
    return f"{plan.data_parallel} x {plan.micro_batch} x {plan.accumulation} = {plan.global_batch}"
