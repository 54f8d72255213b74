"""MLflow: a run in an experiment; MLFLOW_TRACKING_URI says where."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import RunFacts, SinkType, text_of_alert

_AT_ONCE = 1000  # most metrics of one request that MLflow accepts
_TAG = 5000  # characters of a tag
_FORBIDDEN = re.compile(r"[^\w. /:-]")


class Mlflow:
    """Sends numbers in batches."""

    def __init__(self, experiment: str, facts: RunFacts) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        self._waiting: list[Any] = []
        tags = {"mlflow.runName": facts.name, **{_key(k): str(v) for k, v in facts.as_config().items()}}
        self._run: str = self._client.create_run(self._experiment(experiment), tags=tags).info.run_id

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`."""
        self._waiting += [
            self._metric(_key(f"{PREFIX}/{name}"), value, time_ms, step) for name, value in metrics.items()
        ]
        if len(self._waiting) >= _AT_ONCE:
            self.flush()

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - tags have no time
        """As in `Sink`; the last of each rule is a tag of the run."""
        said = f"{finding.severity}: {text_of_alert(finding, step)}"
        self._client.set_tag(self._run, f"{PREFIX}.alert.{finding.code}", said[:_TAG])

    def flush(self) -> None:
        """As in `Sink`."""
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), _AT_ONCE):
            self._client.log_batch(self._run, metrics=waiting[at : at + _AT_ONCE])

    def close(self) -> None:
        """As in `Sink`."""
        self.flush()
        self._client.set_terminated(self._run, end_time=time.time_ns() // 1_000_000)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another process has just made it
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)


def _key(name: str) -> str:
    """Replaces characters that MLflow refuses, as in names of modules."""
    return _FORBIDDEN.sub("_", name)[:250]


KIND = SinkType(
    name="mlflow",
    target="EXPERIMENT",
    help="A run of MLflow; MLFLOW_TRACKING_URI and the like are its own.",
    begin=Mlflow,
    module="mlflow",
    often=False,
)
