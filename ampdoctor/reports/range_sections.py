"""The sections of `profile` and `recommend`: loss scaling, ranges by layer as histograms, precision by module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampdoctor.reports import words
from ampdoctor.reports.sanitise import sanitise

_ROWS = ("fp16", "fp16_recommended", "fp16_unscaled", "bf16", "e4m3fn", "e5m2")
_KINDS = {"activation_grad": "dA", "weight_grad": "dW", "activation": "A", "weight": "W"}
_GRADIENTS = ("activation_grad", "weight_grad")
_BARS = " ▁▂▃▄▅▆▇█"
_FIRST, _LAST, _BINADES = -44, 16, 3
"""Exponents that a histogram shows, and how many of them share a column: fp16's window at scales from 1 to 2^20."""
_NEGLIGIBLE = 1e-5
"""Differences of gradient errors that are not worth a word."""
_SEEN, _OFF = 1e-3, 0.1
"""Share from which a prediction has to hold, and its relative distance from what was measured that is worth a word."""
_FEW = 12
"""Layers shown without -v: those that lose most."""
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def loss_scaling(scaler: Mapping[str, Any] | None, console: Console, *, verbose: int) -> None:
    """What is there, what to use, what holds each setting, and what was predicted, simulated and seen."""
    if scaler is None:
        return
    recommended = scaler.get("recommended")
    rows = [("now", _text(_settings(scaler.get("current"))))]
    if scaler.get("change"):
        rows.append(("use", _text(_settings(recommended), "bold")))
    elif scaler.get("predicted"):
        rows.append(("use", _text("no change needed: nothing tried is better by more than noise", "bold")))
    if scaler.get("bound_by") and scaler.get("change"):
        rows.append(("bound by", _text(words.value(scaler["bound_by"]))))
    if scaler.get("change") or verbose:
        rows += [
            ("", _text(f"{name} {bound['value']:g}: {bound['by']}"))
            for name, bound in (scaler.get("bounds") or {}).items()
            if verbose or not bound["by"].startswith(("nothing", "kept as it is; in closed form", "the usual default"))
        ]
    rows += [(name, _text(_outcome(scaler[name]))) for name in ("predicted", "before", "observed") if scaler.get(name)]
    rows += [
        (f"{name} ahead", _text(_expected(expected)))
        for name, expected in (scaler.get("simulated") or {}).items()
        if expected is not None
    ]
    if scaler.get("margin"):
        rows.append(("margin", _text(_margin(scaler["margin"]))))
    if scaler.get("confidence"):
        rows.append(("rests on", _text(_confidence(scaler["confidence"], scaler["horizon"]))))
    _rows("loss scaling", rows, console)
    emitted = scaler.get("emit")
    if emitted:
        _fragment(emitted, console)


def ranges(profile: Mapping[str, Any] | None, console: Console, *, verbose: int) -> None:
    """The shares by format, the layers that lose most with their histograms, and what shadow steps measured."""
    summary = (profile or {}).get("summary") or {}
    if profile is None or not summary:
        return
    _summary(summary, console)
    sites = [site for site in profile.get("sites") or () if site.get("histogram") and _shown(site, verbose)]
    _layers(sites, _measured(profile), console, verbose)
    _shadows(profile.get("shadows") or (), console)


def precision(advice: Mapping[str, Any] | None, console: Console, *, verbose: int) -> None:
    """The precision for the run, and the modules that need another one than that."""
    if advice is None:
        return
    rows = [("use", _text(f"{advice['precision']} on {advice['target']}: {advice['why']}", "bold"))]
    if advice.get("alternative"):
        rows.append(("or", _text(f"{advice['alternative']}, which is as good")))
    rows += [("do", _text(remedy)) for remedy in advice["remedies"]]
    rows += [("note", _text(note)) for note in advice["notes"]]
    _rows("precision", rows, console)
    table = _table("module", "class", "op", "precision", "why")
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in advice["rows"]:
        if verbose or row["precision"] != advice["precision"]:
            key = tuple(row[k] for k in ("type", "part", "precision", "reason"))
            alike.setdefault((*key, row["module"]) if verbose else key, []).append(row["module"])
    for what, modules in list(alike.items())[: None if verbose else _FEW]:
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        table.add_row(_text(f"{modules[0] or 'model, loss'}{more}"), *(_text(word) for word in what[:4]))
    if table.row_count:
        console.print(table)
    _more(len(alike) - table.row_count, "row", console)


def _summary(summary: Mapping[str, Any], console: Console) -> None:
    console.print()
    table = _table("share of nonzero values", "flushed to zero", "subnormal", "overflowing", "relative error", right=1)
    for name in sorted(summary, key=lambda n: (_ROWS.index(n) if n in _ROWS else len(_ROWS), n)):
        for kind, figures in summary[name].items():
            error = figures.get("relative_error")
            table.add_row(
                _text(f"{name} {kind}".replace("_", " ")),
                *(_text(words.percent(figures.get(key))) for key in ("flushed", "subnormal", "overflowed")),
                _text("-" if error is None else words.value(error)),
            )
    console.print(table)


def _shown(site: Mapping[str, Any], verbose: int) -> bool:
    return bool(site.get("half")) and (verbose > 0 or site.get("kind") in _GRADIENTS)


_Place = tuple[str, str, str]


def _place(site: Mapping[str, Any]) -> _Place:
    return site["name"], site["kind"], site["part"]


def _measured(profile: Mapping[str, Any]) -> dict[_Place, float]:
    """What really flushed at the run's own loss scale, by place."""
    shadows = [s for s in profile.get("shadows") or () if s["scale"] == profile.get("loss_scale")]
    return {_place(site): site["measured"] for shadow in shadows for site in shadow["sites"]}


def _layers(
    sites: Sequence[Mapping[str, Any]], measured: Mapping[_Place, float], console: Console, verbose: int
) -> None:
    def flushed(site: Mapping[str, Any], row: str) -> float:
        return float(site["formats"].get(row, {}).get("flushed") or 0.0)

    def loss(site: Mapping[str, Any]) -> tuple[float, float]:
        """What was measured, where it was: a bias whose gradient cancels holds noise, which flushes in vain."""
        here = flushed(site, "fp16")
        return -measured.get(_place(site), here), -here

    if not sites:
        return
    worst = sorted(sites, key=lambda site: (*loss(site), site["name"], site["kind"]))
    axis = f"2^{_FIRST} to 2^{_LAST}"
    table = _table("layer", "", "fp16", "measured", "fits", "e5m2", axis, right=2, until=6)
    for site in worst[: None if verbose else _FEW]:
        seen = measured.get(_place(site))
        table.add_row(
            _text((site["name"] or "model") + (".input" if site["part"] == "input" else "")),
            _text(_KINDS.get(site["kind"], site["kind"])),
            _text(words.percent(flushed(site, "fp16"))),
            _text("-" if seen is None else words.percent(seen)),
            *(
                _text(words.percent(flushed(site, row)) if row in site["formats"] else "-")
                for row in ("fp16_recommended", "e5m2")
            ),
            Text(_bars(site["histogram"])),
        )
    console.print()
    console.print(Text("layers, those that lose most first", "bold"))
    console.print(table)
    _more(len(worst) - table.row_count, "layer", console)
    about = "dA activation gradients, dW weight gradients (A and W: -v); fits: at the scale that fits; magnitudes of"
    console.print(_text(f"{about} the measured gradients by exponent, {_BINADES} binades a column", "dim"))


def _bars(histogram: Mapping[str, Any]) -> str:
    """Counts by exponent as bars, each as high as the logarithm of its share; smaller magnitudes than fit are first."""
    columns = [0] * ((_LAST - _FIRST) // _BINADES)
    for index, count in zip(histogram.get("bins") or (), histogram.get("counts") or (), strict=False):
        exponent = index // 8 - 127
        columns[min(max((exponent - _FIRST) // _BINADES, 0), len(columns) - 1)] += count
    top = math.log1p(max(columns, default=0))
    return "".join(_BARS[math.ceil(8 * math.log1p(count) / top)] if count else " " for count in columns)


def _shadows(shadows: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not shadows:
        return
    table = _table("loss scale", "gradients", "flushed, predicted", "measured", "", right=2, until=4)
    for shadow in shadows:
        for kind, pair in shadow["flushed"].items():
            table.add_row(
                _text(words.value(shadow["scale"])),
                _text(kind.replace("_grad", "")),
                _text(words.percent(pair["predicted"])),
                _text(words.percent(pair["measured"])),
                _text(_remark(pair), "dim"),
            )
    console.print()
    console.print(Text("fp16 steps beside fp32 ones on the same batch and weights", "bold"))
    console.print(table)


def _remark(pair: Mapping[str, Any]) -> str:
    if pair["lower_bound"]:
        return "prediction is a lower bound"
    predicted, measured = pair["predicted"], pair["measured"]
    if predicted is None or measured is None or max(predicted, measured) < _SEEN:
        return ""
    off = abs(predicted - measured) > _OFF * measured
    return "what was measured counts: sums that cancel, or few values, tell it otherwise" if off else ""


def _outcome(outcome: Mapping[str, Any]) -> str:
    parts = [f"steps skipped {words.percent(outcome.get('skip_rate'))}"]
    flushed = outcome.get("flushed") or {}
    parts += [f"{kind.replace('_', ' ')} flushed {words.percent(share)}" for kind, share in flushed.items()]
    if outcome.get("relative_error") is not None:
        parts.append(f"relative error {words.value(outcome['relative_error'])}")
    return ", ".join(parts)


def _expected(expected: Mapping[str, Any]) -> str:
    low, middle, high = expected["skips"]
    text = f"skips {middle:g} steps ({low:g} to {high:g})"
    text += f", gradient error {words.value(expected['relative_error'])}"
    return text + (", weights ruined" if expected["poisoned"] else "")


def _margin(margin: Mapping[str, Any]) -> str:
    gains = []
    if margin["skip_rate"] > 0.0:
        gains.append(f"skip {words.percent(margin['skip_rate'])} fewer steps")
    if margin["relative_error"] > _NEGLIGIBLE:
        gains.append(f"have a gradient error lower by {words.value(margin['relative_error'])}")
    text = f"the best settings found {' and '.join(gains)}" if gains else "no settings found are better"
    below = margin.get("headroom")
    if not isinstance(below, int | float):
        return text
    where = "at what fits" if below == 0 else f"2^{abs(below):.3g} {'below' if below > 0 else 'above'} what fits"
    return f"{text}; the scale starts {where}"


def _confidence(confidence: Mapping[str, Any], horizon: int) -> str:
    text = f"{words.count(confidence['steps'], 'recorded step')}; in {horizon} steps ahead the largest of them is"
    text += f" expected to be exceeded {confidence['exceedances']:.3g} times"
    if confidence["censored"]:
        text += f"; {words.percent(confidence['censored'])} of the steps hide their largest gradient"
    if confidence["drift"]:
        text += f"; gradients drift by {confidence['drift']:.2g} binades a step, taken to go on for as long again"
    return f"{text}{'; few: record 50 or more' if confidence['low'] else ''}"


def _fragment(emitted: Mapping[str, Any], console: Console) -> None:
    """Lines to copy: never folded, which would break them."""
    console.print(_text(f"  for {emitted['framework']}", "dim"))
    for line in str(emitted["text"]).splitlines():
        console.print(Text(f"    {sanitise(line)}"), soft_wrap=True)
    for note in emitted["notes"]:
        console.print(Padding(_text(f"note: {note}", "dim"), (0, 0, 0, 2)))


def _settings(settings: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key}={words.value(v)}" for key, v in settings.items()) if settings else "none"


def _text(text: str, style: str = "") -> Text:
    return Text(sanitise(text), style=style, overflow="fold")


def _table(*headings: str, right: int | None = None, until: int | None = None) -> Table:
    table = Table(title=None, box=None, padding=(0, 2, 0, 0), show_edge=False)
    for index, heading in enumerate(headings):
        numbers = right is not None and right <= index < (until or len(headings))
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    return table


def _rows(title: str, rows: Sequence[tuple[str, Text]], console: Console) -> None:
    console.print()
    console.print(Text(title, "bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for label, text in rows:
        table.add_row(Text(label), text)
    console.print(Padding(table, (0, 0, 0, 2)))


def _more(number: int, what: str, console: Console) -> None:
    if number > 0:
        console.print(_text(f"... and {words.count(number, 'more ' + what)} (-v)", "dim"))
