"""The page of the command line, from the commands themselves: what their `--help` says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from ampdoctor.cli.app import app

MARKER = "<!-- the commands go here -->"


def fill(_app: Any, _page: str, source: list[str]) -> None:
    """Put the commands' sections in the place of the marker; Sphinx calls this for every page that it reads."""
    if MARKER in source[0]:
        source[0] = source[0].replace(MARKER, rendered())


def rendered() -> str:
    """One section for each command: its usage, what it does, its arguments and options, as Markdown."""
    root: Any = typer.main.get_command(app)
    return "\n\n".join(_section(name, command) for name, command in root.commands.items() if not command.hidden)


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], parent=None, resilient_parsing=True)
    usage = " ".join(["ampdoctor", name, *command.collect_usage_pieces(context)])
    lines = [f"## `{name}`", "", "```", usage, "```", "", _text(command.help or "")]
    if rows := list(_rows(command, context)):
        lines += ["", "| option | what it is |", "| --- | --- |", *rows]
    return "\n".join(lines)


def _rows(command: Any, context: Any) -> Iterator[str]:
    """A row for each argument and option, in the order and the words of the help."""
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            names, words = record
            yield f"| `{names.replace('|', chr(92) + '|')}` | {_text(words)} |"


def _text(text: str) -> str:
    joined = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    return re.sub(r"([|<>*\[\]])", r"\\\1", joined)
