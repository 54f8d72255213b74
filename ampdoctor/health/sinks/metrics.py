"""The numbers of a run under the names that sinks show, each with its unit and meaning.

Names follow OpenMetrics (base units as suffix, counters end in `_total`), and are the same in every sink.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ampdoctor.evidence.log_records import (
    ActionLine,
    AlertLine,
    CheckpointLine,
    DetailLine,
    EndLine,
    LogRecord,
    LookLine,
    RunLine,
    StepLine,
    TensorDetail,
)
from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.sink import RunFacts

Type = Literal["gauge", "counter", "histogram"]
Keep = Literal["last", "highest", "lowest"]
PREFIX = "ampdoctor"  # prefix of our names where they stand among others


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a run."""

    name: str  # its suffix is the unit where it has one
    help: str
    _: KW_ONLY
    type: Type = "gauge"  # as in OpenMetrics; a histogram is made of the single values that a sink gets
    label: str = ""  # what it is split by: "layer" or "reason"; "" for one number a run
    keep: Keep = "last"  # which of several steps' values is shown; a non-finite one takes precedence
    of: Literal["step", "detail", "other"] = "step"  # the kind of line that it comes from

    @property
    def unit(self) -> str:
        """The name's suffix where it is a unit."""
        suffix = self.name.rpartition("_")[2]
        return suffix if suffix in {"seconds", "bytes", "ratio", "log2"} else ""


def _ratios(what: str, help_: str) -> tuple[Metric, Metric]:
    single = "The same of single tensors, of those where it is largest."
    return (
        Metric(f"{what}_max_ratio", f"{help_}, of the tensor where it is largest.", keep="highest", of="detail"),
        Metric(f"{what}_ratio", single, label="layer", keep="highest", of="detail"),
    )


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("step_total", "Steps that were attempted.", type="counter"),
        Metric(
            "skipped_steps_total",
            "Steps that were not taken: gradients that overflow, a spike, or a policy.",
            type="counter",
            label="reason",
        ),
        Metric("loss", "Loss as the loop computed it.", keep="highest"),
        Metric("loss_finite", "1 where the loss is finite, else 0.", keep="lowest"),
        Metric("gradient_norm", "L2 norm of all gradients, unscaled and before clipping.", keep="highest"),
        Metric("clipped_gradient_norm", "L2 norm of all gradients, after clipping.", keep="highest"),
        Metric("loss_scale", "Factor that the loss is multiplied by.", keep="lowest"),
        Metric("learning_rate", "Learning rate of the first parameter group."),
        Metric("step_duration_seconds", "Time from the step before to this one.", type="histogram", keep="highest"),
        Metric("data_wait_ratio", "Share of a step's time that the loop waits for its data.", keep="highest"),
        Metric(
            "memory_active_peak_bytes",
            "Most memory that tensors held on the device since the step before.",
            keep="highest",
        ),
        Metric("memory_retries_total", "How often the allocator freed its cache and tried again.", type="counter"),
        Metric("samples_total", "Samples of all ranks.", type="counter"),
        Metric("tokens_total", "Tokens of all ranks.", type="counter"),
        Metric("samples_per_second", "Samples of all ranks a second, since the step before."),
        Metric("tokens_per_second", "Tokens of all ranks a second, since the step before."),
        Metric(
            "gradient_headroom_log2",
            "Powers of two from the largest gradient of any tensor to its format's maximum, at the loss scale.",
            keep="lowest",
            of="detail",
        ),
        *_ratios("underflow", "Share of a gradient that half precision flushes to zero"),
        *_ratios("zero", "Share of a gradient that is zero"),
        *_ratios("update", "Norm of a tensor's update over that of the tensor"),
        Metric("nonfinite_tensors", "Tensors with NaN or infinite elements.", keep="highest", of="detail"),
        Metric("running", "1 from the run's first step until it ends in order, then 0.", of="other"),
        Metric("rollbacks_total", "Rollbacks to an earlier checkpoint.", type="counter", of="other"),
        Metric(
            "last_good_checkpoint_timestamp_seconds",
            "When the last checkpoint turned out good, in seconds since 1970.",
            of="other",
        ),
    )
}


class Name(NamedTuple):
    """The parts of a name in a sink."""

    metric: Metric
    label: str  # the layer or the reason; "" for neither
    optimizer: str  # "" for the first


def name_of(metric: str, label: str = "", optimizer: str = "") -> str:
    """Returns a number's name in a sink."""
    return "/".join(part for part in (optimizer, metric, label) if part)


@lru_cache(4096)
def parts_of(name: str) -> Name:
    """Returns the parts of such a name; raises KeyError for an unknown metric."""
    first, _, rest = name.partition("/")
    if first in METRICS:
        return Name(METRICS[first], rest, "")
    metric, _, label = rest.partition("/")
    return Name(METRICS[metric], label, first)


def together(held: dict[str, float], more: Mapping[str, float]) -> None:
    """Merges a later step's numbers into those that stand for several steps."""
    for name, value in more.items():
        before = held.get(name)
        keep = parts_of(name).metric.keep
        if before is None or not math.isfinite(value) or (keep == "last" and math.isfinite(before)):
            held[name] = value
        elif math.isfinite(before):
            held[name] = max(before, value) if keep == "highest" else min(before, value)


# -- lines of a log as numbers and alerts --

LAYERS = 8  # shown layers of a metric, those with the largest values: each is a series, and a model has hundreds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Numbers of a step."""

    step: int  # the attempted step
    time_ms: int  # since 1970, when the line was written
    values: dict[str, float]  # by name; at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A finding at a step."""

    step: int  # the attempted step
    time_ms: int  # since 1970, when the line was written
    finding: Finding


class Projection:
    """Makes rows and alerts from the lines of one run's log; `facts` is None before the first line."""

    def __init__(self) -> None:
        self.facts: RunFacts | None = None
        self._header = RunLine(name="")
        self._details: LogRecord | None = None  # the lines of a long look so far
        self._skipped: dict[str, int] = {}
        self._rollbacks = 0
        self._before: dict[str, StepLine] = {}

    def of(self, whole: LogRecord) -> Iterator[Row | Alert]:
        """Yields the rows and alerts of a line, and those of a look that the line completes."""
        line = whole.line
        if self.facts is None or isinstance(line, RunLine):
            self._begin(whole)
        if isinstance(line, RunLine):  # has no numbers, and may come between the lines of a look
            return
        held = self._details
        if isinstance(line, DetailLine):
            if held is not None and isinstance(held.line, DetailLine) and _are_one(held.line, line):
                tensors = (*held.line.tensors, *line.tensors)
                self._details = replace(held, line=replace(held.line, tensors=tensors))
                return
            self._details = whole
        else:
            self._details = None
        if held is not None:
            yield from self._row(held)
        if not isinstance(line, DetailLine):
            yield from self._row(whole)
            yield from _alerts(whole)

    def rest(self) -> Iterator[Row]:
        """Yields the row of a look that no further line has completed."""
        held, self._details = self._details, None
        if held is not None:
            yield from self._row(held)

    def _begin(self, whole: LogRecord) -> None:
        self._header = header = whole.line if isinstance(whole.line, RunLine) else self._header
        self.facts = RunFacts(
            name=header.name or whole.stamp.run_id,
            run_id=whole.stamp.run_id,
            version=header.tool,
            precision=header.precision or "",
            world_size=whole.stamp.world_size,
        )

    def _row(self, whole: LogRecord) -> Iterator[Row]:
        line = whole.line
        if isinstance(line, StepLine):
            step, values = line.step, self._of_step(line)
        elif isinstance(line, DetailLine):
            step, values = line.step, self._of_detail(line)
        elif isinstance(line, ActionLine):
            step, values = line.step, self._of_action(line)
        elif isinstance(line, CheckpointLine) and line.health == "good":
            step, values = line.step, {"last_good_checkpoint_timestamp_seconds": whole.stamp.time_ms / 1000}
        elif isinstance(line, EndLine):
            step, values = max(line.steps - 1, 0), {"running": 0.0}
        else:
            return
        if values:
            yield Row(step=step, time_ms=whole.stamp.time_ms, values=values)

    def _of_step(self, line: StepLine) -> dict[str, float]:
        optimizer = self._optimizer(line.optimizer)
        before, self._before[optimizer] = self._before.get(optimizer), line
        known: dict[str, float | None] = {
            "step_total": line.step + 1,
            "loss": line.loss,
            "loss_finite": None if line.loss is None else float(math.isfinite(line.loss)),
            "gradient_norm": line.norm,
            "clipped_gradient_norm": line.clipped_norm,
            "loss_scale": line.loss_scale,
            "learning_rate": line.learning_rates[0] if line.learning_rates else None,
            "step_duration_seconds": line.seconds,
            "data_wait_ratio": _over(line.data_seconds, line.seconds),
            "memory_active_peak_bytes": line.memory_bytes,
            "memory_retries_total": line.memory_retries,
            "samples_total": line.samples,
            "tokens_total": line.tokens,
            "samples_per_second": line.per_second("samples", before),
            "tokens_per_second": line.per_second("tokens", before),
        }
        values = {name_of(name, "", optimizer): float(value) for name, value in known.items() if value is not None}
        if line.skipped is not None:
            values |= self._skips(optimizer, "overflow", int(line.skipped))
        return values

    def _skips(self, optimizer: str, reason: str, more: int) -> dict[str, float]:
        name = name_of("skipped_steps_total", reason, optimizer)
        self._skipped[name] = self._skipped.get(name, 0) + more
        return {name: float(self._skipped[name])}

    def _of_action(self, line: ActionLine) -> dict[str, float]:
        if line.action == "skip":
            return self._skips("", "spike" if line.facts.get("why") == "spike" else "policy", 1)
        if line.action != "rollback":
            return {}
        self._rollbacks += 1
        return {"rollbacks_total": float(self._rollbacks)}

    def _of_detail(self, line: DetailLine) -> dict[str, float]:
        optimizer = self._optimizer(line.optimizer)
        gradients = [one for one in line.tensors if one.role == "gradient"]
        headroom = [one.log2_headroom for one in gradients if one.log2_headroom is not None]
        values = {"gradient_headroom_log2": min(headroom)} if headroom else {}
        values |= self._worst("underflow", ((one, one.flushed_share) for one in gradients))
        values |= self._worst("zero", ((one, one.zero_share) for one in gradients))
        values |= self._worst("update", ((one, one.update_ratio) for one in line.tensors))
        counted = [one.nonfinite for one in line.tensors if one.nonfinite is not None]
        if counted:
            values["nonfinite_tensors"] = float(sum(map(bool, counted)))
        return {name_of(name, "", optimizer): value for name, value in values.items()}

    def _worst(self, what: str, found: Iterable[tuple[TensorDetail, float | None]]) -> dict[str, float]:
        known = [(value, one.tensor) for one, value in found if value is not None and not math.isnan(value)]
        if not known:
            return {}
        values = {f"{what}_max_ratio": max(value for value, _ in known)}
        names = self._header.tensors
        for value, tensor in heapq.nlargest(LAYERS, known):
            if value > 0 and tensor < len(names):
                name = name_of(f"{what}_ratio", names[tensor])
                values[name] = max(values.get(name, 0.0), value)
        return values

    def _optimizer(self, index: int) -> str:
        """Returns the name of an optimizer; "" for the first, which is the only one of most runs."""
        names = self._header.optimizers
        return "" if not index else names[index] if index < len(names) else f"optimizer{index + 1}"


def _alerts(whole: LogRecord) -> Iterator[Alert]:
    line = whole.line
    if isinstance(line, AlertLine | LookLine):
        for finding in (line.finding,) if isinstance(line, AlertLine) else line.findings:
            yield Alert(step=line.step, time_ms=whole.stamp.time_ms, finding=finding)


def _are_one(held: DetailLine, more: DetailLine) -> bool:
    """Whether two lines belong to one look: a long one takes several lines."""
    return (held.step, held.optimizer, held.reason) == (more.step, more.optimizer, more.reason)


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
