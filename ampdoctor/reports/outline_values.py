"""The parts of a report's outline that are tables of values: the ranges of a profile, and what lies in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ampdoctor.evidence.report import Report
from ampdoctor.evidence.report_scan import ChangedCheckpoint, ChangeSection, ListedTensor, TrendFigures
from ampdoctor.reports import text as words
from ampdoctor.reports.blocks import Block, Fold, Heading, Line, Table, Text, fold, pairs, table

# -- profiles: the formats, and the layers that lose most --

KINDS: Mapping[str, str] = {"activation_grad": "dA", "weight_grad": "dW", "activation": "A", "weight": "W"}
_GRADIENTS = ("activation_grad", "weight_grad")
_SUMMARY_HEADINGS = ("format", "", "flushed", "subnormal", "overflow", "error")
_LAYER_HEADINGS = ("layer", "", "fp16", "measured", "fits", "e5m2")
_MEASURED = _LAYER_HEADINGS.index("measured")
_FEW_LAYERS = 12
_ROWS = ("fp16", "fp16_recommended", "fp16_unscaled", "bf16", "e4m3fn", "e5m2")

Site: TypeAlias = Mapping[str, Any]


def ranges(profile: Mapping[str, Any] | None) -> Iterator[Block]:
    """Yield the shares by format, and the layers that lose most."""
    if profile is None or not profile.get("summary"):
        return
    yield Heading(text="ranges", level=2, anchor="ranges", view="ranges")
    scales = (
        f"{words.binary(profile.get('loss_scale'))}, the one that fits {words.binary(profile.get('recommended_scale'))}"
    )
    yield Text(f"{words.count(profile['steps'], 'measured step')}; loss scale of the run {scales}", "muted")
    yield Heading(text=f"nonzero gradients in each format {words.ABOUT_GRADIENTS}")
    if measured_gradients(profile):
        yield from table(_SUMMARY_HEADINGS, summary_rows(profile), [""])
        yield from fold("fp16 steps beside fp32 ones: measured against predicted", *_shadows(profile))
    else:
        yield Text("not measured: no gradient of a half tensor is finite and nonzero")
    yield from _layers(profile)


def _shadows(profile: Mapping[str, Any]) -> tuple[Table, ...]:
    rows = [
        (
            words.binary(shadow["scale"]),
            KINDS[kind],
            f"{'at least ' if pair['lower_bound'] else ''}{words.percent(pair['predicted'])}",
            words.percent(pair["measured"]),
        )
        for shadow in profile.get("shadows") or ()
        for kind, pair in shadow["flushed"].items()
    ]
    return table(("loss scale", "", "flushed, predicted", "measured"), rows, [""])


def _layers(profile: Mapping[str, Any]) -> Iterator[Block]:
    """Yield gradients, those that lose most first, then activations and weights, which no loss scale changes."""
    at_run = [s for s in profile.get("shadows") or () if s["scale"] == profile.get("loss_scale")]
    measured = {_place(site): site["measured"] for shadow in at_run for site in shadow["sites"]}
    sites = [s for s in profile.get("sites") or () if s.get("half") and (s.get("histogram") or {}).get("bins")]

    def loss(site: Site) -> tuple[float, float, str, str]:
        """Returns the measured loss first, if any: the flushed gradient of a bias may be noise that cancels."""
        here = _flushed(site, "fp16") or 0.0
        return -measured.get(_place(site), here), -here, site["name"], site["kind"]

    def rows(of: Iterable[Site]) -> list[list[str]]:
        made = [
            [
                (site["name"] or "model") + (".input" if site["part"] == "input" else ""),
                KINDS.get(site["kind"], site["kind"]),
                words.percent(_flushed(site, "fp16")),
                words.percent(measured.get(_place(site))),
                words.percent(_flushed(site, "fp16_recommended")),
                words.percent(_flushed(site, "e5m2")),
            ]
            for site in sorted(of, key=loss)
        ]
        return made if measured else [row[:_MEASURED] + row[_MEASURED + 1 :] for row in made]

    headings = _LAYER_HEADINGS if measured else _LAYER_HEADINGS[:_MEASURED] + _LAYER_HEADINGS[_MEASURED + 1 :]
    gradients = rows(site for site in sites if site["kind"] in _GRADIENTS)
    others = rows(site for site in sites if site["kind"] not in _GRADIENTS)
    of_replay = "; measured: in replayed fp16 steps" if measured else ""
    yield Heading(text="layers, those that lose most first")
    if gradients:
        yield Text(f"flushed to zero in fp16 at the run's loss scale{of_replay}; fits: at the scale that fits", "muted")
    yield from table(headings, gradients[:_FEW_LAYERS], [""])
    more = words.count(len(gradients) - _FEW_LAYERS, "more layer")
    yield from fold(more, *table(headings, gradients[_FEW_LAYERS:], [""]))
    title = "the same of activations (A) and weights (W), which no loss scale moves"
    yield from fold(title, *table(headings, others, [""]))


def _flushed(site: Site, row: str) -> float | None:
    flushed: float | None = site["formats"].get(row, {}).get("flushed")
    return flushed


def _place(site: Site) -> tuple[str, str, str]:
    return site["name"], site["kind"], site["part"]


def measured_gradients(profile: Mapping[str, Any]) -> bool:
    """Whether any gradient had a value to measure."""
    rows = (profile.get("summary") or {}).values()
    return any(figures.get("flushed") is not None for kinds in rows for figures in kinds.values())


def summary_rows(profile: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows below SUMMARY_HEADINGS; a format is named once, beside its first kind."""
    summary = profile.get("summary") or {}
    scales = {
        "fp16": words.binary(profile.get("loss_scale")),
        "fp16_recommended": f"{words.binary(profile.get('recommended_scale'))} (fits)",
        "fp16_unscaled": "1",
    }
    own, fits = profile.get("loss_scale"), profile.get("recommended_scale")
    again = {"fp16": own == fits, "fp16_unscaled": 1.0 in (own, fits)}  # these scales have a row already
    rows = []
    for name in sorted(summary, key=lambda n: (_ROWS.index(n) if n in _ROWS else len(_ROWS), n)):
        if again.get(name):
            continue
        title = f"fp16 at {scales[name]}" if name in scales else name.replace("_", " ")
        for index, (kind, figures) in enumerate(summary[name].items()):
            shares = [words.percent(figures.get(key)) for key in ("flushed", "subnormal", "overflowed")]
            error = words.short(figures.get("relative_error"))
            rows.append(["" if index else title, KINDS.get(kind, kind.replace("_", " ")), *shares, error])
    return rows


# -- scans: checkpoints in order, what changed since an earlier one, the structure --

_MOST_MOVED = 5
_ROLE_NAMES = {
    "weight": "weights",
    "buffer": "buffers",
    "ema": "averaged copies",
    "moment": "optimizer state",
    "scaler": "scaler",
    "other": "other tensors",
}


def trend(report: Report) -> Iterator[Block]:
    """Yield the checkpoints that were read, one a line."""
    section = report.trend
    if section is None:
        return
    verdicts = {member["name"]: member["verdict"] for member in report.target.get("members", ())}
    points = {point.name: point for point in section.points}
    unread = [TrendFigures(name=one["name"], step=one["step"]) for one in report.target.get("members", ())]
    rows = []
    for point in {**{one.name: one for one in unread}, **points}.values():
        weights = point.roles.get("weight")
        verdict = verdicts.get(point.name, "-")
        figures = (words.number(weights and weights.amax), words.percent(weights and weights.fp16_flushed))
        scale, loss = words.number(point.scale), words.number(point.loss)
        rows.append((words.number(point.step), point.name, Text(verdict, verdict), *figures, scale, loss))
    yield Heading(text="checkpoints that were read", level=2, anchor="trend", view="trend")
    head = (section.unit, "checkpoint", "verdict", "largest weight", "flushed in fp16", "loss scale", "loss")
    yield from table(head, rows, ("checkpoint", "verdict"))


def change(section: ChangeSection | None) -> Iterator[Block]:
    """Yield the changes of tensors by role, those that changed most, and those that only one side has."""
    if section is None:
        return
    old, new, steps = section.old, section.new, section.steps
    passed = f", {words.count(steps, 'step')}" if isinstance(steps, int) and steps > 0 else ""
    yield Heading(text=f"since {old.path} ({_at(old)} to {_at(new)}{passed})", level=2, anchor="change")
    rows = [
        (
            _ROLE_NAMES[role],
            str(figures.tensors),
            words.percent(figures.unchanged),
            *map(words.number, (figures.relative_change, figures.old_amax, figures.amax)),
        )
        for role, figures in section.roles.items()
    ]
    head = ("", "tensors", "unchanged", "relative change", "largest before", "largest now")
    yield from table(head, rows)
    if old.scale is not None or new.scale is not None:
        yield Text(f"loss scale: {words.number(old.scale)} then, {words.number(new.scale)} now")
    moved = sorted(
        (-t.relative_change, t.name)
        for t in section.tensors
        if t.role == "weight" and t.relative_change is not None and 0 < t.relative_change < math.inf
    )[:_MOST_MOVED]
    if moved:
        line = ", ".join(f"{name} {words.number(-change)}" for change, name in moved)
        yield Text(f"moved most, relative to before: {line}")
    growing = (
        (one.tensor, *map(words.number, (one.old_amax, one.amax, one.log2_growth, one.intervals, one.meets_at)))
        for one in section.growth
    )
    head = ("tensor", "largest before", "now", "powers of two", "intervals left", "meets it at step")
    yield from fold("growing towards fp16's largest value, 65,504", *table(head, growing))
    for title, names in (("appeared", section.appeared), ("vanished", section.vanished)):
        yield from fold(f"{title}: {words.count(len(names), 'tensor')}", *((Text(", ".join(names)),) if names else ()))
    shapes = ((name, f"{words.value(was)} to {words.value(now)}") for name, (was, now) in section.reshaped.items())
    yield from fold(f"reshaped: {words.count(len(section.reshaped), 'tensor')}", *pairs(shapes))
    if section.tensors:
        yield Fold(title=Text("tensor by tensor"), open=True, view="change")


def structure(report: Report) -> Iterator[Block]:
    """Yield everything in a checkpoint by role."""
    section, target = report.structure, report.target
    if section is None:
        return
    yield Heading(text="structure", level=2, anchor="structure", view="structure" if section.tensors else "")
    members = [
        ("-" if one.step is None else f"{'epoch ' * (one.unit == 'epoch')}{one.step}", one.name, ", ".join(one.files))
        for one in section.members
    ]
    if members:
        yield Text(f"{words.count(len(members), 'checkpoint')}, in order; name one of them to list it")
        yield from table(("step", "checkpoint", "files"), members, ("checkpoint", "files"))
    if section.tensors:
        step, files = target.get("global_step"), words.count(len(target.get("files", ())), "file")
        known = f"global step {step}" if step is not None else "no step stored"
        sizes = f"{words.count(len(section.tensors), 'tensor')}, {words.size(target.get('bytes', 0))}"
        yield Text(f"{sizes}, {files}, {known}")
    holding = list(dict.fromkeys(tensor.file for tensor in section.tensors))
    several = len(holding) > 1
    for role, total in section.roles.items():
        rows = [
            (_name(tensor), tensor.dtype, str(list(tensor.shape)), words.size(tensor.bytes))
            + ((f"[{holding.index(tensor.file) + 1}]",) if several else ())
            for tensor in section.tensors
            if tensor.role == role
        ]
        of = ", ".join(f"{count} {name}" for name, count in total.dtypes.items())
        elements = f"{total.elements:,} elements, {words.size(total.bytes)}"
        yield Heading(text=f"{_ROLE_NAMES[role]}: {words.count(total.tensors, 'tensor')} ({of}), {elements}")
        head = ("name", "dtype", "shape", "size", *(("file",) if several else ()))
        yield Table(head=head, rows=tuple(rows), left=frozenset({"dtype", "shape"}), scripted=True)
    listed: dict[str, list[tuple[str, Line]]] = {
        "files": [(f"[{index}]", file) for index, file in enumerate(holding, start=1)] if several else [],
        "optimizers": [],
        "loss scalers": [
            (s["key"] or "scaler", words.settings(s, words.value, {"key", "file"})) for s in section.scalers
        ],
        "log": [],
        "names that only an unsafe load would resolve": [("", name) for name in section.unsafe_globals],
    }
    for optimizer in section.optimizers:
        states = words.count(optimizer.parameters, "parameter")
        listed["optimizers"].append((optimizer.path or "optimizer", f"state of {states}"))
        for index, group in enumerate(optimizer.groups):
            holds = "" if group.parameters is None else f" ({words.count(group.parameters, 'parameter')})"
            listed["optimizers"].append((f"group {index}{holds}", words.settings(group.settings, words.value)))
    if section.log is not None:
        log = section.log
        listed["log"].append(("", f"{words.count(log.entries, 'line')}, steps {log.first_step} to {log.last_step}"))
    for title, lines in listed.items():
        if lines:
            yield Heading(text=title)
            yield from pairs(lines)


def _name(tensor: ListedTensor) -> str:
    name = f"{tensor.group}.{tensor.name}" if tensor.group else tensor.name
    return f"{name}: {tensor.entry}" if tensor.role == "moment" or tensor.entry == "step" else name


def _at(side: ChangedCheckpoint) -> str:
    return "step unknown" if side.global_step is None else f"step {side.global_step}"
