"""The trackers: TensorBoard's event files, Weights & Biases, trackio (which has its interface) and MLflow.

Environment variables of the libraries decide between online, offline and disabled, and where a server is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import RunFacts, SinkType, text_of_alert, title_of

# -- TensorBoard --


class TensorBoard:
    """Writes a step as one event with TensorBoard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: str, facts: RunFacts) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(Path(folder, _as_folder(facts.name))))

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`."""
        values = [self._summary.Value(tag=f"{PREFIX}/{name}", simple_value=value) for name, value in metrics.items()]
        self._add(values, step, time_ms)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:
        """As in `Sink`."""
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text import metadata

        text = f"**{finding.severity}** {text_of_alert(finding, step)}".encode()
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype="DT_STRING", string_val=[text], tensor_shape=shape)
        tag = f"{PREFIX}/alerts/{title_of(finding)}"
        told = self._summary.Value(tag=tag, metadata=metadata.create_summary_metadata(tag, ""), tensor=tensor)
        self._add([told], step, time_ms)

    def flush(self) -> None:
        """As in `Sink`."""
        self._writer.flush()

    def close(self) -> None:
        """As in `Sink`."""
        self._writer.close()

    def _add(self, values: list[Any], step: int, time_ms: int) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time_ms / 1000, summary=self._summary(value=values)))


def _as_folder(name: str) -> str:
    """Returns a folder's name for a run, by which TensorBoard tells runs apart."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip(".") or "run"


def _writes(folder: str, run: str) -> tuple[str, ...]:
    """Returns a path inside the run's folder; the writer adds a unique suffix to the file's name."""
    return (str(Path(folder, _as_folder(run), "events.out.tfevents")),)


TENSORBOARD = SinkType(
    name="tensorboard",
    target="DIR",
    help="Event files for TensorBoard, in a folder named for the run.",
    begin=TensorBoard,
    module="tensorboard",
    is_path=True,
    writes=_writes,
)


# -- Weights & Biases, and trackio --

_LEVELS = {"error": "ERROR", "warning": "WARN"}  # notes send no alert


class Wandb:
    """Logs to a run of its own. Its steps are logged as a metric, since they may repeat."""

    def __init__(self, project: str, facts: RunFacts) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=facts.name,
            config=facts.as_config(),
            job_type=PREFIX,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
        )
        self._run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`; one row."""
        row = {f"{PREFIX}/{name}": value for name, value in metrics.items()}
        self._run.log({**row, f"{PREFIX}/step": step, "_timestamp": time_ms / 1000})

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - W&B sends it at once
        """As in `Sink`; W&B sends it to subscribers by mail or Slack."""
        if finding.severity in _LEVELS:
            self._run.alert(title_of(finding), text_of_alert(finding, step), level=_LEVELS[finding.severity])

    def flush(self) -> None:
        """As in `Sink`; the library sends by itself."""

    def close(self) -> None:
        """As in `Sink`."""
        self._run.finish()


class Trackio(Wandb):
    """Logs to a run of its own, without hardware metrics: reading them would begin to use the hardware."""

    def __init__(self, project: str, facts: RunFacts) -> None:
        import trackio

        self._levels = {"error": trackio.AlertLevel.ERROR, "warning": trackio.AlertLevel.WARN}
        self._run = trackio.init(
            project, facts.name, config=facts.as_config(), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:  # noqa: ARG002 - it takes no time
        """As in `Sink`; the time is that of arrival."""
        self._run.log({f"{PREFIX}/{name}": value for name, value in metrics.items()}, step=step)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - the same
        """As in `Sink`; notes are not sent."""
        if finding.severity in self._levels:
            level = self._levels[finding.severity]
            self._run.alert(title_of(finding), text_of_alert(finding, step), level, step=step)


WANDB = SinkType(
    name="wandb",
    target="PROJECT",
    help="A run of Weights & Biases; WANDB_MODE and the like are its own.",
    begin=Wandb,
    module="wandb",
    often=False,
)
TRACKIO = SinkType(
    name="trackio",
    target="PROJECT",
    help="A run of trackio; TRACKIO_SPACE_ID and the like are its own.",
    begin=Trackio,
    module="trackio",
    often=False,
)


# -- MLflow --

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


MLFLOW = SinkType(
    name="mlflow",
    target="EXPERIMENT",
    help="A run of MLflow; MLFLOW_TRACKING_URI and the like are its own.",
    begin=Mlflow,
    module="mlflow",
    often=False,
)
