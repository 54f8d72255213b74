"""TensorBoard: an event file in a folder, with scalars, and alerts as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import RunFacts, SinkType, text_of_alert, title_of


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


KIND = SinkType(
    name="tensorboard",
    target="DIR",
    help="Event files for TensorBoard, in a folder named for the run.",
    begin=TensorBoard,
    module="tensorboard",
    is_path=True,
    writes=_writes,
)
