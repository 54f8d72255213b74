"""OpenMetrics: a text file, for Prometheus's node_exporter or any reader of OpenMetrics."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import LAYERS, METRICS, PREFIX, Metric, name_of, parts_of
from ampdoctor.health.sinks.sink import RunFacts, SinkType

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

# -- a run as text, in OpenMetrics or in Prometheus's older format, which node_exporter reads --

_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Upper bounds of the buckets of a step's time."""
_ALERTS = Metric("alerts_total", "What was noticed, by its cause.", type="counter")
_AGE = Metric("last_good_checkpoint_age_seconds", "Since the last checkpoint turned out good, when this was written.")
_LAST_STEP = Metric("last_step_timestamp_seconds", "When the last step was logged, in seconds since 1970.")
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
        """Counts a value; a non-finite one is ignored, since it would make the sum non-finite."""
        if math.isfinite(value):
            self.counts[bisect_left(_BOUNDS_S, value)] += 1
            self.sum += value


class OpenMetricsFile:
    """Writes a run's current state anew, completely or not at all, so that no reader sees a part.

    node_exporter reads `*.prom`, in Prometheus's own format and not in OpenMetrics; a file of another name is
    OpenMetrics. Counters exist from the beginning, so that their first increase is visible. The run's name is a label
    of every series, since several runs may share a machine.
    """

    def __init__(self, path: str, facts: RunFacts) -> None:
        from prometheus_client import CollectorRegistry

        self._path = Path(os.path.realpath(path))  # writes the target of a link, and keeps the link
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
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.flush()

    def collect(self) -> Iterator[Family]:
        """Yields the state; the library asks for it."""
        from prometheus_client.core import Metric as Family

        good = self._values.get(_GOOD, {}).get(())
        if good is not None:
            self._set(_AGE, (), max(time.time() - good, 0.0))
        facts = self._facts
        run = Family(f"{PREFIX}_run", "What the run is.", "info")
        known = {"precision": facts.precision, "run_id": facts.run_id, "version": facts.version}
        run.add_sample(f"{PREFIX}_run_info", {"run": facts.name, **known, "world_size": str(facts.world_size)}, 1)
        yield run
        for metric in FAMILIES:
            samples = list(self._samples(metric))
            if samples:
                family = Family(f"{PREFIX}_{metric.name.removesuffix('_total')}", metric.help, metric.type, metric.unit)
                for name, labels, value in samples:
                    family.add_sample(f"{PREFIX}_{name}", {"run": facts.name, **dict(labels)}, value)
                yield family

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`."""
        for name, value in metrics.items():
            self._take(name, value, step, time_ms)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - a counter needs neither
        """As in `Sink`; a counter."""
        labels = (("cause", finding.cause or finding.name), ("severity", finding.severity))
        self._set(_ALERTS, labels, self._values[_ALERTS.name].get(labels, 0.0) + 1)

    def flush(self) -> None:
        """As in `Sink`."""
        from prometheus_client import exposition
        from prometheus_client.openmetrics import exposition as openmetrics

        written = exposition.generate_latest if self._path.suffix == ".prom" else openmetrics.generate_latest
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            beside.unlink(missing_ok=True)  # an old process's, or a planted link
            with beside.open("xb") as file:  # "x" follows no link
                file.write(written(self._registry))
            beside.replace(self._path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    def close(self) -> None:
        """As in `Sink`; the last state stays."""
        self.flush()

    def _take(self, name: str, value: float, step: int, time_ms: int) -> None:
        metric, label, optimizer = parts_of(name)
        if metric.label == "layer" and self._layers_of.get(name_of(metric.name, "", optimizer)) != step:
            self._layers_of[name_of(metric.name, "", optimizer)] = step
            held = self._values.get(metric.name, {})
            self._values[metric.name] = {k: v for k, v in held.items() if dict(k).get("optimizer", "") != optimizer}
        labels = tuple((key, text) for key, text in ((metric.label, label), ("optimizer", optimizer)) if key and text)
        if metric.type == "histogram":
            self._histograms.setdefault(metric.name, {}).setdefault(labels, _Histogram()).add(value)
        elif metric.type != "counter" or math.isfinite(value):  # no reader accepts a non-finite counter
            self._set(metric, labels, value)
        if metric.name == "step_total":
            self._set(_LAST_STEP, (), time_ms / 1000)

    def _set(self, metric: Metric, labels: Labels, value: float) -> None:
        self._values.setdefault(metric.name, {})[labels] = value

    def _samples(self, metric: Metric) -> Iterator[tuple[str, Labels, float]]:
        for labels, histogram in self._histograms.get(metric.name, {}).items():
            below = 0
            for bound, count in zip((*_BOUNDS_S, math.inf), histogram.counts, strict=True):
                below += count
                yield f"{metric.name}_bucket", (*labels, ("le", "+Inf" if bound == math.inf else str(bound))), below
            yield f"{metric.name}_sum", labels, histogram.sum
            yield f"{metric.name}_count", labels, below
        values = self._values.get(metric.name, {})
        if metric.label == "layer":
            values = dict(sorted(values.items(), key=lambda item: -item[1])[:LAYERS])
        for labels, value in sorted(values.items()):
            yield metric.name, labels, value


KIND = SinkType(
    name="openmetrics",
    target="FILE",
    help="A file for Prometheus: for node_exporter (*.prom), or in OpenMetrics.",
    begin=OpenMetricsFile,
    module="prometheus_client",
    is_path=True,
    writes=lambda target, _run: (target,),
)
