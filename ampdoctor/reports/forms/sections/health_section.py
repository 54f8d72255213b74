"""The section of the human report on runs over their steps."""

from __future__ import annotations

from rich.console import Console

from ampdoctor.evidence.report_health import HealthSection
from ampdoctor.reports.forms.sections.layout import heading, labelled, show, text
from ampdoctor.reports.words import health_words


def health(section: HealthSection | None, console: Console) -> None:
    """Print each run: a line, what became of its scaler, its checkpoints, and what replays the steps that were kept."""
    for run in section.runs if section is not None else ():
        heading(health_words.title(run), console)
        show(text(health_words.run_line(run)), console, indent=2, hang=2)
        labelled(((label, text(said)) for label, said in health_words.facts(run)), console)
        for command in health_words.commands(run):
            console.print(text(f"    {command}"), soft_wrap=True)
