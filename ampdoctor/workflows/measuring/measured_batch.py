"""What the log of a watched run says of its batch and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mode

from ampdoctor.batching.settings import BatchSettings
from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.run_log.lines import RunLine, Stamped, StepLine
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.opening import find_log


def batch_of_log(path: str) -> BatchSettings:
    """Returns what a run has measured of itself: ranks, accumulation, samples of a step, and the most memory.

    What parallel sizes its ranks have is in no log: they are taken to see other samples each.

    Args:
        path: The folder of its log.

    Raises:
        UsageError: There is no log, it cannot be read, or no step is in it.
    """
    try:
        found = find_log(Path(path))
        return _measured(found.lines(Noticed()), path)
    except CheckpointError as error:
        raise UsageError(f"the log cannot be read: {error}") from None


def _measured(lines: Iterable[Stamped], path: str) -> BatchSettings:
    devices, precision, peak = 1, None, 0
    steps, counted = [], []
    for one in lines:
        devices = max(devices, one.stamp.world_size)
        if isinstance(one.line, RunLine):
            precision = one.line.precision or precision
        elif isinstance(one.line, StepLine) and one.line.optimizer == 0:
            steps.append(one.line.micro_steps or 1)
            peak = max(peak, one.line.memory_bytes or 0)
            if one.stamp.rank == 0 and one.line.samples is not None:
                counted.append((one.line.step, one.line.samples))
    if not steps:
        raise UsageError(f"{path} is a log without a step")
    accumulation = mode(steps)  # an epoch's last step may be shorter
    grown = [(b - a) // (at - was) for (was, a), (at, b) in pairwise(counted) if at > was]
    batch = mode(grown) if grown else 0
    micro, left = divmod(batch, accumulation * devices)
    return BatchSettings(
        devices=devices,
        accumulation=accumulation,
        micro_batch=micro if micro and not left else None,
        precision=precision if precision in ("fp32", "tf32", "bf16", "fp16", "fp8") else None,  # type: ignore[arg-type]
        peak_memory=peak or None,
        unmeasured=not peak,
        notes=("The batch in force is what the run's log has counted.",),
    )
