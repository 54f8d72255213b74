"""CSV files in a folder: `steps.csv`, a line a step; `others.csv`, a line for each number of a layer; `alerts.csv`."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ampdoctor.errors import OutputError
from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import METRICS, parts_of
from ampdoctor.health.sinks.sink import RunFacts, SinkType

_FILES = ("steps.csv", "others.csv", "alerts.csv")
_STEPS = ["step", "time_ms", "optimizer", *(m.name for m in METRICS.values() if m.of == "step" and not m.label)]
_OTHERS = ["step", "time_ms", "optimizer", "metric", "label", "value"]
_ALERTS = ["step", "time_ms", "severity", "code", "name", "message", "help"]


class CsvFiles:
    """Appends to the files of a folder, each with a header; OutputError where one has another header or is a link."""

    def __init__(self, folder: str, _facts: RunFacts) -> None:
        self._files: list[TextIO] = []
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self._steps, self._others, self._alerts = (
            self._begin(place / name, columns) for name, columns in zip(_FILES, (_STEPS, _OTHERS, _ALERTS), strict=True)
        )

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`: numbers of the step itself make one line, all others a line each."""
        wide: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            metric, label, optimizer = parts_of(name)
            if metric.of == "step" and not metric.label:
                wide.setdefault(optimizer, {})[metric.name] = value
            else:
                row = dict(zip(_OTHERS, (step, time_ms, optimizer, metric.name, label, _text(value)), strict=True))
                self._others.writerow(row)
        for optimizer, values in wide.items():
            told = {name: _text(value) for name, value in values.items()}
            self._steps.writerow({"step": step, "time_ms": time_ms, "optimizer": optimizer, **told})

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:
        """As in `Sink`."""
        said = {key: getattr(finding, key) for key in ("severity", "code", "name", "message", "help")}
        self._alerts.writerow({"step": step, "time_ms": time_ms, **said})

    def flush(self) -> None:
        """As in `Sink`."""
        for file in self._files:
            file.flush()

    def close(self) -> None:
        """As in `Sink`."""
        for file in self._files:
            file.close()

    def _begin(self, path: Path, columns: list[str]) -> csv.DictWriter[str]:
        header = ",".join(columns)
        if path.is_symlink():  # a configuration file that was found may only write into its own folder
            self.close()
            raise OutputError(f"{path} is a link, and is not followed: name the folder that it leads to")
        file = open(path, "a+", newline="", encoding="utf-8", errors="replace", opener=_no_link)  # noqa: SIM115
        self._files.append(file)
        file.seek(0)
        first = file.readline(len(header) + 2).rstrip("\r\n")
        if first not in ("", header):
            self.close()
            raise OutputError(f"{path} has other columns than those of an export, and stays as it is")
        writer = csv.DictWriter(file, columns)
        if not first:
            writer.writeheader()
        return writer


def _no_link(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _text(value: float) -> str:
    """Returns a text for pandas and spreadsheets: whole numbers without a point, and nan, inf and -inf."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"


KIND = SinkType(
    name="csv",
    target="DIR",
    help="Files that a spreadsheet reads.",
    begin=CsvFiles,
    is_path=True,
    writes=lambda folder, _run: tuple(str(Path(folder, name)) for name in _FILES),
)
