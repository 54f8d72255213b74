"""The sections that only a scan has: its checkpoints in order, what changed since an earlier one, and the structure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from ampdoctor.evidence.report import Report
from ampdoctor.evidence.report_scan import ChangedCheckpoint, ListedMember, ListedOptimizer, ListedTensor, TrendFigures
from ampdoctor.reports.forms.sections import layout
from ampdoctor.reports.forms.sections.layout import listed, table_of, text, titled
from ampdoctor.reports.words import words

_VERDICT_STYLE = {"sick": "bold red", "healthy": "green", "unreadable": "bold yellow", "inconclusive": "yellow"}
_ROLE_NAMES = {
    "weight": "weights",
    "buffer": "buffers",
    "ema": "averaged copies",
    "moment": "optimizer state",
    "scaler": "scaler",
    "other": "other tensors",
}
_UNITS = ("B", "kB", "MB", "GB", "TB")
_MOST_MOVED = 5


def trend(report: Report, console: Console) -> None:
    """The checkpoints that were read, one a line."""
    section = report.trend
    if section is None:
        return
    points = {point.name: point for point in section.points}
    rows = []
    for member in report.target.get("members", ()):
        point = points.get(member["name"], TrendFigures(name="", step=member["step"]))
        weights = point.roles.get("weight")
        step = point.step
        rows.append(
            (
                "-" if step is None else str(step),
                member["name"],
                text(member["verdict"], _VERDICT_STYLE.get(member["verdict"], "")),
                _number(weights and weights.amax),
                words.percent(weights and weights.fp16_flushed),
                _number(point.scale),
                _number(point.loss),
            )
        )
    headings = (section.unit, "checkpoint", "verdict", "largest weight", "flushed in fp16", "loss scale", "loss")
    titled("checkpoints that were read", table_of(headings, rows, left=("checkpoint", "verdict")), console)


def change(report: Report, console: Console) -> None:
    """What became of the tensors, by role, and which moved most."""
    section = report.change
    if section is None:
        return
    old, new = section.old, section.new
    steps = section.steps
    passed = f", {words.count(steps, 'step')}" if isinstance(steps, int) and steps > 0 else ""
    rows = [
        (
            _ROLE_NAMES[role],
            str(figures.tensors),
            words.percent(figures.unchanged),
            _number(figures.relative_change),
            _number(figures.old_amax),
            _number(figures.amax),
        )
        for role, figures in section.roles.items()
    ]
    headings = ("", "tensors", "unchanged", "relative change", "largest before", "largest now")
    title = f"since {old.path} ({_at(old)} to {_at(new)}{passed})"
    titled(title, table_of(headings, rows), console)
    if old.scale is not None or new.scale is not None:
        line = f"loss scale: {_number(old.scale)} then, {_number(new.scale)} now"
        layout.show(text(line), console, indent=2, hang=2)
    moved = sorted(
        (-t.relative_change, t.name)
        for t in section.tensors
        if t.role == "weight" and t.relative_change is not None and 0 < t.relative_change < math.inf
    )[:_MOST_MOVED]
    if moved:
        line = ", ".join(f"{name} {_number(-change)}" for change, name in moved)
        layout.show(text(f"moved most, relative to before: {line}"), console, indent=2, hang=2)


def structure(report: Report, console: Console) -> None:
    """Everything that lies in a checkpoint, by role; names are folded, never cut."""
    section = report.structure
    if section is None:
        return
    _members(section.members, console)
    target = report.target
    if section.tensors:
        step = target.get("global_step")
        files = target.get("files", ())
        parts = [
            words.count(len(section.tensors), "tensor"),
            _size(target.get("bytes", 0)),
            words.count(len(files), "file"),
        ]
        layout.show(text(", ".join([*parts, f"global step {step}" if step is not None else "no step stored"])), console)
    holding = list(dict.fromkeys(tensor.file for tensor in section.tensors))
    several = len(holding) > 1
    for role, total in section.roles.items():
        rows = [
            (_name(tensor), tensor.dtype, str(list(tensor.shape)), _size(tensor.bytes))
            + ((f"[{holding.index(tensor.file) + 1}]",) if several else ())
            for tensor in section.tensors
            if tensor.role == role
        ]
        headings = ("name", "dtype", "shape", "size", *(("file",) if several else ()))
        table = table_of(headings, rows, left=("dtype", "shape"))
        of = ", ".join(f"{count} {name}" for name, count in total.dtypes.items())
        titled(
            f"{_ROLE_NAMES[role]}: {words.count(total.tensors, 'tensor')} ({of}), {total.elements:,} elements, "
            f"{_size(total.bytes)}",
            table,
            console,
        )
    if several:
        listed("files", [f"[{index}] {file}" for index, file in enumerate(holding, start=1)], console)
    _optimizers(section.optimizers, console)
    listed(
        "loss scalers",
        (f"{s['key'] or 'scaler'}: {_settings(s, {'key', 'file'})}" for s in section.scalers),
        console,
    )
    log = section.log
    if log is not None:
        steps = f"steps {log.first_step} to {log.last_step}"
        listed("log", [f"{words.count(log.entries, 'line')}, {steps}"], console)
    listed("names that only an unsafe load would resolve", section.foreign, console)


def _members(members: Sequence[ListedMember], console: Console) -> None:
    if not members:
        return
    rows = []
    for member in members:
        files = ", ".join(member.files)
        at = "-" if member.step is None else f"{'epoch ' * (member.unit == 'epoch')}{member.step}"
        rows.append((at, member.name, files))
    table = table_of(("step", "checkpoint", "files"), rows, left=("checkpoint", "files"))
    titled(f"{words.count(len(members), 'checkpoint')}, in order; name one of them to list it", table, console)


def _optimizers(optimizers: Iterable[ListedOptimizer], console: Console) -> None:
    lines = []
    for optimizer in optimizers:
        states = words.count(optimizer.parameters, "parameter")
        lines.append(f"{optimizer.path or 'optimizer'}: state of {states}")
        for index, group in enumerate(optimizer.groups):
            count = group.parameters
            holds = "" if count is None else f" ({words.count(count, 'parameter')})"
            lines.append(f"  group {index}{holds}: {_settings(group.settings, set())}")
    listed("optimizers", lines, console)


def _settings(settings: Mapping[str, Any], without: set[str]) -> str:
    return ", ".join(f"{key}={words.value(item)}" for key, item in settings.items() if key not in without)


def _name(tensor: ListedTensor) -> str:
    name = f"{tensor.group}.{tensor.name}" if tensor.group else tensor.name
    return f"{name}: {tensor.entry}" if tensor.role == "moment" or tensor.entry == "step" else name


def _at(side: ChangedCheckpoint) -> str:
    step = side.global_step
    return "step unknown" if step is None else f"step {step}"


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


def _number(number: Any) -> str:
    if number is None:
        return "-"
    return f"{number:.4g}" if not _finite(number) or float(number) != int(number) else f"{int(number)}"


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
