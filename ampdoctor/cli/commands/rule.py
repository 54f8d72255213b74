"""`ampdoctor rule`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampdoctor.cli.options.options import ListFormat
from ampdoctor.cli.process.action import Action
from ampdoctor.cli.process.exit_code import Outcome
from ampdoctor.cli.process.output import canvas
from ampdoctor.cli.process.streams import report_stream, write_stdout
from ampdoctor.errors import EXIT_OK
from ampdoctor.reports.formats import Color

if TYPE_CHECKING:
    from rich.console import Console

    from ampdoctor.diagnosis.catalogue import Rule
    from ampdoctor.evidence.thresholds import Threshold


def _completions(incomplete: str) -> list[tuple[str, str]]:
    """Codes and names that begin so, each with what it is about."""
    from ampdoctor.diagnosis.catalogue import rules

    codes = [(rule.code, rule.title) for rule in rules().values() if rule.code.startswith(incomplete.upper())]
    if incomplete[:1].islower():  # a shell keeps only what begins as it was typed, and any case is understood
        codes = [(code.lower(), title) for code, title in codes]
    names = [(rule.name, rule.title) for rule in rules().values() if incomplete and rule.name.startswith(incomplete)]
    return codes or names


def rule(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE",
            help="A code (AMP201) or a name (forward-overflow); without: all.",
            autocompletion=_completions,
        ),
    ] = None,
    form: Annotated[ListFormat, typer.Option("--format", help="Form of the page.")] = "human",
    color: Annotated[Color, typer.Option("--color", help="auto: colour on a terminal, as NO_COLOR etc. say.")] = "auto",
) -> Action:
    """Explain a finding's code.

    What it means, how it is decided, what to do, and where it is known to be wrong.
    """

    def action() -> Outcome:
        rules = _chosen(code)
        write_stdout(_as_json(rules) if form == "json" else _as_text(rules, color, whole=code is not None))
        return Outcome(EXIT_OK)

    return action


def _chosen(wanted: str | None) -> list[Rule]:
    from ampdoctor.diagnosis.catalogue import find_rule, rules

    return list(rules().values()) if wanted is None else [find_rule(wanted)]


def _as_json(rules: list[Rule]) -> str:
    from ampdoctor.reports.json_report import strict_json

    return strict_json([_whole(rule) for rule in rules])


def _whole(rule: Rule) -> dict[str, Any]:
    """A rule with its page and its thresholds, as JSON."""
    thresholds = [
        {
            "name": threshold.name,
            "default": threshold.default,
            "unit": threshold.unit,
            "lowest": threshold.lowest,
            "highest": threshold.highest,
            "option": threshold.option,
            "why": threshold.why,
        }
        for threshold in rule.thresholds
    ]
    named = {"code": rule.code, "name": rule.name, "title": rule.title, "worst": rule.worst}
    return {**named, **asdict(rule.page), "thresholds": thresholds}


def _as_text(rules: list[Rule], color: Color, *, whole: bool) -> str:
    from rich.text import Text

    def show(console: Console) -> None:
        for rule in rules:
            console.print(Text(f"{rule.code} {rule.name}", "bold") + Text(f": {rule.title}"))
            for heading, text in ({"worst": rule.worst} | asdict(rule.page)).items() if whole else ():
                console.print(Text(f"\n{heading}", "bold"))
                console.print(Text(text))
            if whole and rule.thresholds:
                console.print(Text("\nthresholds, to be moved with --threshold CODE.NAME=VALUE", "bold"))
                for threshold in rule.thresholds:
                    console.print(Text(_line(threshold)))

    return canvas(report_stream(), color=color).draw(show)


def _line(threshold: Threshold) -> str:
    """A threshold in a line: what it is, what it may be, and why."""
    short = f", {threshold.option}" if threshold.option else ""
    range_ = f"{threshold.unit}, {threshold.lowest:g} to {threshold.highest:g}{short}"
    return f"{threshold.key} = {threshold.default:g} ({range_}): {threshold.why}"
