"""The sections of `profile` and `recommend`: loss scaling, precision by module, and ranges by format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report_scaler import (
    EmittedSettings,
    ScalerSection,
    ScalingConfidence,
    ScalingMargin,
    Simulated,
)
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.reports.forms.sections import layer_section, layout
from ampdoctor.reports.forms.sections.layout import labelled, text
from ampdoctor.reports.words import words
from ampdoctor.reports.words.range_words import (
    ABOUT,
    KINDS,
    NOT_MEASURED,
    SUMMARY_HEADINGS,
    ahead,
    measured_gradients,
    summary_rows,
)
from ampdoctor.reports.words.sanitise import sanitise

_NEGLIGIBLE = 1e-5
"""Differences of gradient errors that are not worth a word."""
_SEEN, _OFF = 1e-3, 0.1
"""Share from which a prediction has to hold, and its relative distance from what was measured that is worth a word."""
_FEW = 12
"""Groups of modules shown without -v."""


def loss_scaling(scaler: ScalerSection | None, console: Console, *, verbose: int) -> None:
    """What is there, what to use, what holds each setting, and what was predicted, simulated and seen."""
    if scaler is None:
        return
    recommended = None if scaler.recommended is None else asdict(scaler.recommended)
    rows = [("now", text(_settings(scaler.current, words.value)))]
    if scaler.change:
        rows.append(("use", text(_settings(recommended), "bold")))
    elif scaler.predicted:
        rows.append(("use", text("no change needed: nothing tried is better by more than noise", "bold")))
    if scaler.bound_by and scaler.change:
        rows.append(("bound by", text(words.value(scaler.bound_by))))
    if scaler.change or verbose:
        rows += [
            ("", text(f"{name} {exact(bound.value)}: {bound.by}"))
            for name, bound in (scaler.bounds or {}).items()
            if verbose or not bound.by.startswith(("nothing", "kept as it is; in closed form", "the usual default"))
        ]
    if scaler.margin is not None:
        rows.append(("margin", text(_margin(scaler.margin))))
    if scaler.confidence is not None:
        rows.append(("rests on", text(_confidence(scaler.confidence, scaler.horizon))))
    layout.heading("loss scaling", console)
    labelled(rows, console)
    _outcomes(scaler, console)
    _simulated(scaler, console)
    if scaler.emit is not None:
        _fragment(scaler.emit, console)


def ranges(profile: Mapping[str, Any] | None, console: Console, *, verbose: int) -> None:
    """The shares by format, the layers that lose most with their histograms, and what shadow steps measured."""
    if profile is None or not profile.get("summary"):
        return
    _summary(profile, console)
    layer_section.layers(profile, console, verbose=verbose)
    _shadows(profile.get("shadows") or (), console)


def precision(advice: PrecisionAdvice | None, console: Console, *, verbose: int) -> None:
    """The precision for the run, and the modules that need another one than that."""
    if advice is None:
        return
    rows = [("use", text(f"{advice.precision} on {advice.target}: {advice.why}", "bold"))]
    if advice.alternative:
        rows.append(("or", text(f"{advice.alternative}, which is as good")))
    rows += [("do", text(remedy)) for remedy in advice.remedies]
    rows += [("note", text(note)) for note in advice.notes]
    layout.heading("precision", console)
    labelled(rows, console)
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in advice.rows:
        if verbose or row.precision != advice.precision:
            key = (row.type, row.part, row.precision, row.reason)
            alike.setdefault((*key, row.module) if verbose else key, []).append(row.module)
    shown = list(alike.items())[: None if verbose else _FEW]
    if shown:
        layout.heading("modules, and the precision of what they compute", console)
    for (kind, op, fmt, why, *_), modules in shown:
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        named = f"{modules[0] or 'model, loss'}{more} ({kind}): {op} in {fmt}"
        layout.show(text(named), console, indent=2, hang=2)
        layout.show(text(why, "dim"), console, indent=4)
    layout.left_over(len(alike) - len(shown), "row", console)


def _summary(profile: Mapping[str, Any], console: Console) -> None:
    """Shares of the nonzero gradients by format."""
    title = f"nonzero gradients in each format {ABOUT}"
    if measured_gradients(profile):
        layout.titled(title, layout.table_of(SUMMARY_HEADINGS, summary_rows(profile), left=[""]), console)
    else:
        layout.heading(title, console)
        layout.show(text(NOT_MEASURED), console, indent=2, hang=2)


def _shadows(shadows: Sequence[Mapping[str, Any]], console: Console) -> None:
    rows = [
        [
            words.binary(shadow["scale"]),
            KINDS.get(kind, kind),
            words.percent(pair["predicted"]),
            words.percent(pair["measured"]),
            text(_remark(pair), "dim"),
        ]
        for shadow in shadows
        for kind, pair in shadow["flushed"].items()
        if pair["measured"] is not None
    ]
    if not rows:
        return
    headings = ("loss scale", "", "predicted", "measured", " ")
    layout.titled(
        "flushed to zero in fp16 steps, beside fp32 ones on the same batch and weights",
        layout.table_of(headings, rows, left=["", " "]),
        console,
    )


def _remark(pair: Mapping[str, Any]) -> str:
    if pair["lower_bound"]:
        return "prediction is a lower bound"
    predicted, measured = pair["predicted"], pair["measured"]
    if predicted is None or measured is None or max(predicted, measured) < _SEEN:
        return ""
    off = abs(predicted - measured) > _OFF * measured
    return "what was measured counts: sums that cancel, or few values, tell it otherwise" if off else ""


def _outcomes(scaler: ScalerSection, console: Console) -> None:
    """What the scaling costs: as predicted, and as replays have measured it."""
    changed = scaler.change
    names = {"before": "replayed as it is", "observed": "replayed with the change" if changed else "replayed"}
    rows = []
    outcomes = {"predicted": scaler.predicted, "before": scaler.before, "observed": scaler.observed}
    for name, outcome in outcomes.items():
        if outcome is not None:
            shares = [outcome.skip_rate, outcome.flushed.activation_grad, outcome.flushed.weight_grad]
            rows.append([names.get(name, name), *map(words.percent, shares), words.short(outcome.relative_error)])
    if rows:
        headings = ("", "steps skipped", "dA flushed", "dW flushed", "error")
        layout.titled(f"what it costs the gradients {ABOUT}", layout.table_of(headings, rows), console)


def _simulated(scaler: ScalerSection, console: Console) -> None:
    """The same from a simulation of the scaler over many steps to come."""
    rows = []
    simulated = scaler.simulated or Simulated(current=None, default=None, recommended=None)
    for name, expected in (
        ("current", simulated.current),
        ("default", simulated.default),
        ("recommended", simulated.recommended),
    ):
        if expected is not None:
            low, middle, high = expected.skips
            skips = f"{middle:g}" if low == high else f"{middle:g} ({low:g} to {high:g})"
            ruined = "weights ruined" if expected.poisoned else ""
            rows.append([name, skips, words.short(expected.relative_error), ruined])
    if rows:
        table = layout.table_of(("settings", "steps skipped", "error", ""), rows, left=[""])
        layout.titled(f"simulated over {scaler.horizon} steps to come", table, console)


def _margin(margin: ScalingMargin) -> str:
    gains = []
    if margin.skip_rate > 0.0:
        gains.append(f"skip {words.percent(margin.skip_rate)} fewer steps")
    if margin.relative_error > _NEGLIGIBLE:
        gains.append(f"have a gradient error lower by {words.short(margin.relative_error)}")
    text = f"simulated, the best settings found {' and '.join(gains)}" if gains else "no settings found are better"
    below = margin.headroom
    where = "at what fits" if below == 0 else f"2^{abs(below):.3g} {'below' if below > 0 else 'above'} what fits"
    return f"{text}; the scale starts {where}"


def _confidence(confidence: ScalingConfidence, horizon: int | None) -> str:
    text = f"{words.count(confidence.steps, 'recorded step')}; {ahead(confidence.exceedances, horizon)}"
    if confidence.censored:
        text += f"; {words.percent(confidence.censored)} of the steps hide their largest gradient"
    if confidence.drift:
        text += f"; gradients drift by {confidence.drift:.2g} binades a step, taken to go on for as long again"
    return f"{text}{'; few: record 50 or more' if confidence.low else ''}"


def _fragment(emitted: EmittedSettings, console: Console) -> None:
    """Lines to copy: never folded, which would break them."""
    layout.show(text(f"  for {emitted.framework}", "dim"), console)
    for line in emitted.text.splitlines():
        console.print(Text(f"    {sanitise(line)}"), soft_wrap=True)
    for note in emitted.notes:
        layout.show(text(f"note: {note}", "dim"), console, indent=2, hang=2)


def _settings(settings: Mapping[str, Any] | None, shown: Callable[[Any], str] = words.setting) -> str:
    return ", ".join(f"{key}={shown(v)}" for key, v in settings.items()) if settings else "none"
