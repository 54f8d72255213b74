"""The sections that only a scan has: its checkpoints in order, what changed since an earlier one, and the structure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampdoctor.evidence.report import Report
from ampdoctor.reports import words
from ampdoctor.reports.sanitise import sanitise

_VERDICT_STYLE = {"sick": "bold red", "healthy": "green", "unreadable": "bold yellow", "inconclusive": "yellow"}
_ROLE_NAMES = {
    "weight": "weights",
    "buffer": "buffers",
    "ema": "averaged copies",
    "moment": "optimizer state",
    "scaler": "scaler",
    "other": "other tensors",
}
_UNITS = ("B", "KB", "MB", "GB", "TB")
_MOST_MOVED = 5


def trend(report: Report, console: Console) -> None:
    """The checkpoints that were read, one a line."""
    section = report.trend
    if section is None:
        return
    points = {point["name"]: point for point in section["points"]}
    table = _table(section["unit"], "checkpoint", "verdict", "largest weight", "flushed in fp16", "loss scale", "loss")
    for member in report.target.get("members", ()):
        point = points.get(member["name"], {})
        weights = point.get("roles", {}).get("weight", {})
        step = point.get("step", member["step"])
        table.add_row(
            _text("-" if step is None else str(step)),
            _text(member["name"]),
            _text(member["verdict"], _VERDICT_STYLE.get(member["verdict"], "")),
            _text(_number(weights.get("amax"))),
            _text(words.percent(weights.get("fp16_flushed"))),
            _text(_number(point.get("scale"))),
            _text(_number(point.get("loss"))),
        )
    _titled("checkpoints that were read", table, console)


def change(report: Report, console: Console) -> None:
    """What became of the tensors, by role, and which moved most."""
    section = report.change
    if section is None:
        return
    old, new = section["old"], section["new"]
    steps = section["steps"]
    passed = f", {words.count(steps, 'step')}" if isinstance(steps, int) and steps > 0 else ""
    table = _table("", "tensors", "unchanged", "relative change", "largest before", "largest now")
    for role, figures in section["roles"].items():
        table.add_row(
            _text(_ROLE_NAMES[role]),
            _text(str(figures["tensors"])),
            _text(words.percent(figures["unchanged"])),
            _text(_number(figures["relative_change"])),
            _text(_number(figures["old_amax"])),
            _text(_number(figures["amax"])),
        )
    _titled(f"since {old['path']} ({_at(old)} to {_at(new)}{passed})", table, console)
    if old["scale"] is not None or new["scale"] is not None:
        line = f"loss scale: {_number(old['scale'])} then, {_number(new['scale'])} now"
        console.print(Padding(_text(line), (0, 0, 0, 2)))
    moved = sorted(
        (t for t in section["tensors"] if t["role"] == "weight" and _finite(t["relative_change"])),
        key=lambda t: (-t["relative_change"], t["name"]),
    )[:_MOST_MOVED]
    moved = [t for t in moved if t["relative_change"] > 0]
    if moved:
        line = ", ".join(f"{t['name']} {_number(t['relative_change'])}" for t in moved)
        console.print(Padding(_text(f"moved most, relative to before: {line}"), (0, 0, 0, 2)))


def structure(report: Report, console: Console) -> None:
    """Everything that lies in a checkpoint, by role; names are folded, never cut."""
    section = report.structure
    if section is None:
        return
    _members(section["members"], console)
    target = report.target
    if section["tensors"]:
        step = target.get("global_step")
        files = target.get("files", ())
        parts = [
            words.count(len(section["tensors"]), "tensor"),
            _size(target.get("bytes", 0)),
            words.count(len(files), "file"),
        ]
        console.print(_text(", ".join([*parts, f"global step {step}" if step is not None else "no step stored"])))
    several = len({tensor["file"] for tensor in section["tensors"]}) > 1
    for role, total in section["roles"].items():
        table = _table("name", "dtype", "shape", "size", *(("file",) if several else ()), left=several)
        for tensor in section["tensors"]:
            if tensor["role"] == role:
                cells = [_name(tensor), tensor["dtype"], str(tensor["shape"]), _size(tensor["bytes"])]
                table.add_row(*map(_text, [*cells, tensor["file"]] if several else cells))
        of = ", ".join(f"{count} {name}" for name, count in total["dtypes"].items())
        _titled(
            f"{_ROLE_NAMES[role]}: {words.count(total['tensors'], 'tensor')} ({of}), {total['elements']:,} elements, "
            f"{_size(total['bytes'])}",
            table,
            console,
        )
    _optimizers(section["optimizers"], console)
    _lines(
        "loss scalers",
        (f"{s['key'] or 'scaler'}: {_settings(s, {'key', 'file'})}" for s in section["scalers"]),
        console,
    )
    log = section["log"]
    if log is not None:
        steps = f"steps {log['first_step']} to {log['last_step']}"
        _lines("log", [f"{words.count(log['entries'], 'line')}, {steps}"], console)
    _lines("names that only an unsafe load would resolve", section["foreign"], console)


def _members(members: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not members:
        return
    table = _table("step", "checkpoint", "files")
    for member in members:
        files = ", ".join(member["files"])
        at = "-" if member["step"] is None else f"{'epoch ' * (member['unit'] == 'epoch')}{member['step']}"
        table.add_row(_text(at), _text(member["name"]), _text(files))
    _titled(f"{words.count(len(members), 'checkpoint')}, in order; name one of them to list it", table, console)


def _optimizers(optimizers: Iterable[Mapping[str, Any]], console: Console) -> None:
    lines = []
    for optimizer in optimizers:
        states = words.count(optimizer["parameters"], "parameter")
        lines.append(f"{optimizer['path'] or 'optimizer'}: state of {states}")
        for index, group in enumerate(optimizer["groups"]):
            count = group["parameters"]
            holds = "" if count is None else f" ({words.count(count, 'parameter')})"
            lines.append(f"  group {index}{holds}: {_settings(group['settings'], set())}")
    _lines("optimizers", lines, console)


def _settings(settings: Mapping[str, Any], without: set[str]) -> str:
    return ", ".join(f"{key}={words.value(item)}" for key, item in settings.items() if key not in without)


def _name(tensor: Mapping[str, Any]) -> str:
    name = f"{tensor['group']}.{tensor['name']}" if tensor["group"] else tensor["name"]
    return f"{name}: {tensor['entry']}" if tensor["role"] == "moment" or tensor["entry"] == "step" else name


def _table(*headings: str, left: bool = False) -> Table:
    """Columns without lines; the first is for names, figures stand to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for index, heading in enumerate(headings):
        named = (
            index == 0
            or heading in {"checkpoint", "verdict", "files", "dtype", "shape"}
            or (left and heading == "file")
        )
        table.add_column(heading, justify="left" if named else "right", overflow="fold")
    return table


def _titled(title: str, table: Table, console: Console) -> None:
    console.print()
    console.print(_text(title, "bold"))
    console.print(Padding(table, (0, 0, 0, 2)))


def _lines(title: str, lines: Iterable[str], console: Console) -> None:
    shown = [_text(line) for line in lines]
    if not shown:
        return
    console.print()
    console.print(_text(title, "bold"))
    for line in shown:
        console.print(Padding(line, (0, 0, 0, 2)))


def _at(side: Mapping[str, Any]) -> str:
    step = side["global_step"]
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


def _text(text: str, style: str = "") -> Text:
    return Text(sanitise(text), style=style, overflow="fold")
