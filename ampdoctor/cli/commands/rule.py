"""`ampdoctor rule`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampdoctor.cli.options.options import ListFormat
from ampdoctor.cli.process.action import Action
from ampdoctor.cli.process.exit_code import Outcome
from ampdoctor.cli.process.output import canvas
from ampdoctor.cli.process.streams import report_stream, write_stdout
from ampdoctor.errors import EXIT_OK
from ampdoctor.reports.forms.canvas import Color

if TYPE_CHECKING:
    from rich.console import Console

    from ampdoctor.diagnosis.catalogue.rule import Rule


def _completions(incomplete: str) -> list[tuple[str, str]]:
    """Codes and names that begin so, each with what it is about."""
    from ampdoctor.diagnosis.catalogue import RULES

    codes = [(rule.code, rule.title) for rule in RULES.values() if rule.code.startswith(incomplete.upper())]
    if incomplete[:1].islower():  # a shell keeps only what begins as it was typed, and any case is understood
        codes = [(code.lower(), title) for code, title in codes]
    names = [(rule.name, rule.title) for rule in RULES.values() if incomplete and rule.name.startswith(incomplete)]
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
        pages = _pages(code)
        write_stdout(_as_json(pages) if form == "json" else _as_text(pages, color, whole=code is not None))
        return Outcome(EXIT_OK)

    return action


def _pages(wanted: str | None) -> list[dict[str, Any]]:
    """Return the pages asked for, each as its fields in order, and its thresholds."""
    from ampdoctor.diagnosis.catalogue import RULES, find_rule

    chosen = list(RULES.values()) if wanted is None else [find_rule(wanted)]
    return [
        {f.name: getattr(page, f.name) or "" for f in fields(page)} | {"thresholds": _thresholds(page)}
        for page in chosen
    ]


def _thresholds(page: Rule) -> list[dict[str, Any]]:
    return [
        {
            "name": threshold.name,
            "default": threshold.default,
            "unit": threshold.unit,
            "lowest": threshold.lowest,
            "highest": threshold.highest,
            "option": threshold.option,
            "why": threshold.why,
        }
        for threshold in page.thresholds
    ]


def _as_json(pages: list[dict[str, Any]]) -> str:
    from ampdoctor.reports.forms.to_json import strict_json

    return strict_json(pages)


def _as_text(pages: list[dict[str, Any]], color: Color, *, whole: bool) -> str:
    from rich.text import Text

    def show(console: Console) -> None:
        for page in pages:
            console.print(Text(f"{page['code']} {page['name']}", "bold") + Text(f": {page['title']}"))
            for name, text in page.items() if whole else ():
                if text and name not in {"code", "name", "title", "thresholds"}:
                    console.print(Text(f"\n{name.replace('_', ' ')}", "bold"))
                    console.print(Text(text))
            if whole and page["thresholds"]:
                console.print(Text("\nthresholds, to be moved with --threshold CODE.NAME=VALUE", "bold"))
                for moved in page["thresholds"]:
                    console.print(Text(_line(page["code"], moved)))

    return canvas(report_stream(), color=color).draw(show)


def _line(code: str, moved: dict[str, Any]) -> str:
    """A threshold in a line: what it is, what it may be, and why."""
    short = f", {moved['option']}" if moved["option"] else ""
    range_ = f"{moved['unit']}, {moved['lowest']:g} to {moved['highest']:g}{short}"
    return f"{code}.{moved['name']} = {moved['default']:g} ({range_}): {moved['why']}"
