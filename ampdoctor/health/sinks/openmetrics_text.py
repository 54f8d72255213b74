"""The state of a run as text, in OpenMetrics or in the older format of Prometheus, which node_exporter reads."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import METRICS, PREFIX, Metric, name_of, parts_of
from ampdoctor.health.sinks.projection import LAYERS
from ampdoctor.health.sinks.sink import RunFacts

_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Upper bounds of the buckets of a step's time."""
_ALERTS = Metric(name="alerts_total", type="counter", help="What was noticed, by its cause.")
_AGE = Metric(
    name="last_good_checkpoint_age_seconds",
    unit="seconds",
    help="Since the last checkpoint turned out good, when this was written.",
)
_LAST_STEP = Metric(
    name="last_step_timestamp_seconds", unit="seconds", help="When the last step was logged, in seconds since 1970."
)
_GOOD = "last_good_checkpoint_timestamp_seconds"
FAMILIES: tuple[Metric, ...] = (*METRICS.values(), _ALERTS, _AGE, _LAST_STEP)
"""Every family but that of the run's own facts, in the order of the text."""

Labels = tuple[tuple[str, str], ...]


class _Histogram:
    """Counts of values up to each bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value; one that is not finite is none, and would make the sum none."""
        if math.isfinite(value):
            self.counts[bisect_left(_BOUNDS_S, value)] += 1
            self.sum += value


class OpenMetricsState:
    """What is known of a run now.

    Counters are there from the beginning, so that their first increase is one.

    Args:
        facts: Of the run; its name is a label of every series, since several runs may share a machine.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        self._layers_of: dict[str, int] = {}
        for reason in ("overflow", "spike", "policy"):
            self._set(METRICS["skipped_steps_total"], (("reason", reason),), 0.0)
        self._set(METRICS["step_total"], (), 0.0)
        self._set(METRICS["rollbacks_total"], (), 0.0)
        self._set(METRICS["running"], (), 1.0)
        for severity in ("error", "warning", "note"):
            self._set(_ALERTS, (("cause", ""), ("severity", severity)), 0.0)

    def log(self, metrics: Mapping[str, float], step: int, time_ms: int) -> None:
        """Takes numbers of a step."""
        for name, value in metrics.items():
            metric, label, optimizer = parts_of(name)
            if metric.label == "layer" and self._layers_of.get(name_of(metric.name, "", optimizer)) != step:
                self._layers_of[name_of(metric.name, "", optimizer)] = step
                held = self._values.get(metric.name, {})
                self._values[metric.name] = {k: v for k, v in held.items() if dict(k).get("optimizer", "") != optimizer}
            labels = tuple(
                (key, text) for key, text in ((metric.label, label), ("optimizer", optimizer)) if key and text
            )
            if metric.type == "histogram":
                self._histograms.setdefault(metric.name, {}).setdefault(labels, _Histogram()).add(value)
            elif metric.type != "counter" or math.isfinite(value):  # a counter that is no number is refused by all
                self._set(metric, labels, value)
            if metric.name == "step_total":
                self._set(_LAST_STEP, (), time_ms / 1000)

    def alert(self, finding: Finding) -> None:
        """Counts an alert."""
        labels = (("cause", finding.cause or finding.name), ("severity", finding.severity))
        self._set(_ALERTS, labels, self._values[_ALERTS.name].get(labels, 0.0) + 1)

    def text(self, now_s: float, *, openmetrics: bool) -> str:
        """Returns the whole of it.

        Args:
            now_s: Seconds since 1970.
            openmetrics: In OpenMetrics 1.0; otherwise in Prometheus's text format 0.0.4.
        """
        good = self._values.get(_GOOD, {}).get(())
        if good is not None:
            self._set(_AGE, (), max(now_s - good, 0.0))
        lines = list(self._facts_as_lines(openmetrics=openmetrics))
        for metric in FAMILIES:
            samples = list(self._samples(metric))
            if samples:
                lines += self._head(metric, openmetrics=openmetrics)
                lines += [f"{PREFIX}_{name}{self._labels(labels)} {_number(value)}" for name, labels, value in samples]
        return "\n".join([*lines, "# EOF\n" if openmetrics else ""])

    def _set(self, metric: Metric, labels: Labels, value: float) -> None:
        self._values.setdefault(metric.name, {})[labels] = value

    def _samples(self, metric: Metric) -> Iterator[tuple[str, Labels, float]]:
        for labels, histogram in self._histograms.get(metric.name, {}).items():
            below = 0
            for bound, count in zip((*_BOUNDS_S, math.inf), histogram.counts, strict=True):
                below += count
                yield f"{metric.name}_bucket", (*labels, ("le", _number(bound))), below
            yield f"{metric.name}_sum", labels, histogram.sum
            yield f"{metric.name}_count", labels, below
        values = self._values.get(metric.name, {})
        if metric.label == "layer":
            values = dict(sorted(values.items(), key=lambda item: -item[1])[:LAYERS])
        for labels, value in sorted(values.items()):
            yield metric.name, labels, value

    def _head(self, metric: Metric, *, openmetrics: bool) -> list[str]:
        name = f"{PREFIX}_{metric.name}"
        if openmetrics and metric.type == "counter":
            name = name.removesuffix("_total")
        unit = [f"# UNIT {name} {metric.unit}"] if openmetrics and metric.unit else []
        return [f"# TYPE {name} {metric.type}", *unit, f"# HELP {name} {metric.help}"]

    def _facts_as_lines(self, *, openmetrics: bool) -> Iterator[str]:
        facts = self._facts
        name, kind = (f"{PREFIX}_run", "info") if openmetrics else (f"{PREFIX}_run_info", "gauge")
        labels = (
            ("precision", facts.precision),
            ("run_id", facts.run_id),
            ("version", facts.version),
            ("world_size", str(facts.world_size)),
        )
        yield f"# TYPE {name} {kind}"
        yield f"# HELP {name} What the run is."
        yield f"{PREFIX}_run_info{self._labels(labels)} 1"

    def _labels(self, labels: Labels) -> str:
        return "{" + ",".join(f'{key}="{_escaped(text)}"' for key, text in (("run", self._facts.name), *labels)) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
