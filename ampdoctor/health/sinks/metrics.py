"""The numbers of a run under the names that sinks show: a metric a line, with its unit and what it means.

Names are as OpenMetrics wants them (base units as suffix, counters end in `_total`), and the same in every sink: what
was looked at in one is found again in another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Type = Literal["gauge", "counter", "histogram"]
Keep = Literal["last", "highest", "lowest"]
PREFIX = "ampdoctor"
"""Of every name, where it stands among others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a run.

    Attributes:
        name: Its name, with its unit where it has one.
        help: What it is.
        type: As of OpenMetrics; a histogram is of the single values that a sink gets.
        unit: The name's suffix; "" for none.
        label: What it is counted or shown by: "layer" or "reason"; "" for one number a run.
        keep: Which of several steps' stands for them where not each can be shown; one that is not finite always does.
        of: The kind of line that it comes from.
    """

    name: str
    help: str
    type: Type = "gauge"
    unit: str = ""
    label: str = ""
    keep: Keep = "last"
    of: Literal["step", "detail", "other"] = "step"


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(name="step_total", type="counter", help="Steps that were attempted."),
        Metric(
            name="skipped_steps_total",
            type="counter",
            label="reason",
            help="Steps that were not taken: gradients that overflow, a spike, or a policy.",
        ),
        Metric(name="loss", keep="highest", help="Loss as the loop computed it."),
        Metric(name="loss_finite", keep="lowest", help="1 where the loss is finite, else 0."),
        Metric(name="gradient_norm", keep="highest", help="L2 norm of all gradients, unscaled and before clipping."),
        Metric(name="clipped_gradient_norm", keep="highest", help="L2 norm of all gradients, after clipping."),
        Metric(name="loss_scale", keep="lowest", help="Factor that the loss is multiplied by."),
        Metric(name="learning_rate", help="Learning rate of the first parameter group."),
        Metric(
            name="step_duration_seconds",
            type="histogram",
            unit="seconds",
            keep="highest",
            help="Time from the step before to this one.",
        ),
        Metric(
            name="data_wait_ratio",
            unit="ratio",
            keep="highest",
            help="Share of a step's time that the loop waits for its data.",
        ),
        Metric(
            name="memory_active_peak_bytes",
            unit="bytes",
            keep="highest",
            help="Most memory that tensors held on the device since the step before.",
        ),
        Metric(
            name="memory_retries_total",
            type="counter",
            help="How often the allocator freed its cache and tried again.",
        ),
        Metric(name="samples_total", type="counter", help="Samples of all ranks."),
        Metric(name="tokens_total", type="counter", help="Tokens of all ranks."),
        Metric(name="samples_per_second", help="Samples of all ranks a second, since the step before."),
        Metric(name="tokens_per_second", help="Tokens of all ranks a second, since the step before."),
        Metric(
            name="gradient_headroom_binades",
            unit="binades",
            keep="lowest",
            of="detail",
            help="Binades from the largest gradient of any tensor to its format's maximum, at the loss scale.",
        ),
        Metric(
            name="underflow_max_ratio",
            unit="ratio",
            keep="highest",
            of="detail",
            help="Share of a gradient that half precision flushes to zero, of the tensor where it is largest.",
        ),
        Metric(
            name="underflow_ratio",
            unit="ratio",
            label="layer",
            keep="highest",
            of="detail",
            help="The same of single tensors, of those where it is largest.",
        ),
        Metric(
            name="zero_max_ratio",
            unit="ratio",
            keep="highest",
            of="detail",
            help="Share of a gradient that is zero, of the tensor where it is largest.",
        ),
        Metric(
            name="zero_ratio",
            unit="ratio",
            label="layer",
            keep="highest",
            of="detail",
            help="The same of single tensors, of those where it is largest.",
        ),
        Metric(
            name="update_max_ratio",
            unit="ratio",
            keep="highest",
            of="detail",
            help="Norm of a tensor's update over that of the tensor, of the tensor where it is largest.",
        ),
        Metric(
            name="update_ratio",
            unit="ratio",
            label="layer",
            keep="highest",
            of="detail",
            help="The same of single tensors, of those where it is largest.",
        ),
        Metric(name="nonfinite_tensors", keep="highest", of="detail", help="Tensors with NaN or infinite elements."),
        Metric(name="running", of="other", help="1 from the run's first step until it ends in order, then 0."),
        Metric(name="rollbacks_total", type="counter", of="other", help="Rollbacks to an earlier checkpoint."),
        Metric(
            name="last_good_checkpoint_timestamp_seconds",
            unit="seconds",
            of="other",
            help="When the last checkpoint turned out good, in seconds since 1970.",
        ),
    )
}


class Name(NamedTuple):
    """What a name consists of.

    Attributes:
        metric: The metric.
        label: Of which layer, or for which reason; "" where it is not of one.
        optimizer: Of which optimizer; "" for the first.
    """

    metric: Metric
    label: str
    optimizer: str


def name_of(metric: str, label: str = "", optimizer: str = "") -> str:
    """Returns the name under which a sink gets a number."""
    return "/".join(part for part in (optimizer, metric, label) if part)


@lru_cache(4096)
def parts_of(name: str) -> Name:
    """Returns what such a name consists of.

    Raises:
        KeyError: There is no such metric.
    """
    first, _, rest = name.partition("/")
    if first in METRICS:
        return Name(METRICS[first], rest, "")
    metric, _, label = rest.partition("/")
    return Name(METRICS[metric], label, first)


def together(held: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds a later step's numbers to those that stand for several steps."""
    for name, value in more.items():
        before = held.get(name)
        keep = parts_of(name).metric.keep
        if before is None or not math.isfinite(value) or (keep == "last" and math.isfinite(before)):
            held[name] = value
        elif math.isfinite(before):
            held[name] = max(before, value) if keep == "highest" else min(before, value)
