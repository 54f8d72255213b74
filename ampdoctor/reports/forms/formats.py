"""The forms that a report can have, by the name that `--format` takes; one renderer a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Literal, TypeAlias, cast

from ampdoctor.evidence.report import Report

ReportFormat = Literal["human", "json", "jsonl", "markdown", "github", "junit", "sarif", "html"]

Renderer: TypeAlias = Callable[[Report], str]
"""Gives the whole text, byte for byte the same for the same report."""

_RENDERERS: Mapping[ReportFormat, str] = {
    "json": "to_json",
    "jsonl": "to_jsonl",
    "markdown": "to_markdown",
    "github": "to_github",
    "junit": "to_junit",
    "sarif": "to_sarif",
    "html": "to_html",
}
"""The file of each; `human` is not among them: it prints to a console of some width."""


def renderer(form: ReportFormat) -> Renderer:
    """Return what renders a form other than `human`, loaded now: most runs need one of them."""
    module = import_module(f"ampdoctor.reports.forms.{_RENDERERS[form]}")
    return cast("Renderer", getattr(module, f"render_{form}"))
