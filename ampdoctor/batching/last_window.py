"""The last window of an epoch, which has fewer micro-batches than a step: what each framework makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.batching.batch_plan import BatchPlan
from ampdoctor.evidence.report_plan import PlanChange
from ampdoctor.evidence.targets import PlanFramework

_RIGHT: tuple[PlanFramework, ...] = ("transformers",)
_TOO_SMALL: tuple[PlanFramework, ...] = ("accelerate", "lightning", "torchrun")
_CARRIED: tuple[PlanFramework, ...] = ("deepspeed",)
_NONE: tuple[PlanFramework, ...] = ("megatron", "torchtitan")
"""transformers 5.23 (`current_gradient_accumulation_steps`), accelerate 1.15 (`sync_with_dataloader`), lightning 2.6.6
(`ClosureResult.from_training_step_output`), deepspeed 0.19.8 (`micro_steps` is never reset), torchtitan 0.2.2
(`DataloaderExhaustedError`)."""
_ENDLESS = "Samples are counted over epochs; where torchtitan's data do end, it drops the window."


def left_over(plan: BatchPlan, samples: int) -> int:
    """Returns how many micro-batches each rank has for the last window of an epoch; 0 if it is whole.

    Ranks that run short repeat samples (DistributedSampler, Accelerate's `even_batches`), so that all have as many.
    """
    return -(-samples // (plan.micro_batch * plan.data_parallel)) % plan.accumulation


def last_window(
    before: BatchPlan | None, after: BatchPlan, samples: int | None, framework: PlanFramework | None
) -> Iterator[PlanChange]:
    """Yields what becomes of the last window.

    Args:
        before: The plan in force.
        after: The plan to come.
        samples: Of an epoch, if that is known.
        framework: Whose loop it is; None for all.
    """
    if framework in _NONE:
        yield PlanChange(what="last partial window", figure="none", said=_ENDLESS)
        return
    was = "" if before is None else f"{_window(before, samples)} -> "
    yield PlanChange(
        what="last partial window",
        figure=f"{was}{_window(after, samples)} micro-batches",
        said="What the end of an epoch leaves of an optimizer step.",
    )
    if after.accumulation == 1 or (samples is not None and not left_over(after, samples)):
        return
    left = 1 if samples is None else left_over(after, samples)
    share = f"{'down to ' if samples is None else ''}x {left / after.accumulation:.3g}"
    for names, figure, said in (
        (_RIGHT, "x 1", "Divided by the micro-batches, or the tokens, that are there: right."),
        (
            _TOO_SMALL,
            share,
            "Each loss is divided by the whole accumulation, and the step is taken: too small a gradient.",
        ),
        (_CARRIED, "x 1, later", "Carried over: the step ends with the next epoch's first micro-batches."),
        (_NONE, "none", _ENDLESS),
    ):
        of = [name for name in names if framework in (None, name)]
        if of:
            yield PlanChange(what=f"its gradient in {', '.join(map(_named, of))}", figure=figure, said=said)


def _named(framework: PlanFramework) -> str:
    return "a loop of one's own" if framework == "torchrun" else framework


def _window(plan: BatchPlan, samples: int | None) -> str:
    if plan.accumulation == 1:
        return "0 of 1"
    if samples is None:
        return f"up to {plan.accumulation - 1} of {plan.accumulation}"
    left = left_over(plan, samples)
    return f"{left} of {plan.accumulation}"
