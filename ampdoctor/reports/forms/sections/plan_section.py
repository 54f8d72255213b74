"""The section of `plan`: the plans, what fits, what they change, and what nobody may leave as it is."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.report_scaler import EmittedSettings
from ampdoctor.reports.forms.sections import layout
from ampdoctor.reports.forms.sections.layout import text
from ampdoctor.reports.words import plan_words
from ampdoctor.reports.words.sanitise import sanitise


def plan(section: PlanSection | None, console: Console, *, verbose: int) -> None:
    """Show it all; of the gradients of a profile those that change most."""
    if section is None:
        return
    layout.titled(f"plans, {section.rule}", _plans(section), console)
    layout.heading("memory of a device", console)
    layout.labelled([(label, text(said)) for label, said in plan_words.memory_rows(section)], console)
    if section.changes:
        layout.heading(plan_words.changes_title(section), console)
        for change in section.changes:
            layout.show(text(f"{change.what}: ") + text(change.figure, "bold"), console, indent=2, hang=2)
            layout.show(text(change.said, "dim"), console, indent=4)
    _flushed(section, console, verbose)
    if section.left_as_it_is:
        table = layout.table_of(plan_words.LEFT_HEADINGS, plan_words.left_rows(section), left=plan_words.LEFT_HEADINGS)
        layout.titled("settings left as they are", table, console)
    if section.emit is not None:
        fragment(section.emit, console)


def fragment(emitted: EmittedSettings, console: Console) -> None:
    """Print settings to copy: never folded, which would break them."""
    layout.heading(f"for {emitted.framework}", console)
    for line in emitted.text.splitlines():
        console.print(Text(f"  {sanitise(line)}"), soft_wrap=True)
    for note in emitted.notes:
        layout.show(text(f"note: {note}", "dim"), console, indent=2, hang=2)


def _plans(section: PlanSection) -> Table:
    rows = [
        [text(cell, "bold" if row[0] == "use" else "") for cell in row]
        for row in map(list, plan_words.plan_rows(section))
    ]
    headings = plan_words.plan_headings(section)
    return layout.table_of(headings, rows, left=[headings[1], headings[-1]])


def _flushed(section: PlanSection, console: Console, verbose: int) -> None:
    flushed = section.flushed
    if flushed is None:
        return
    shown = None if verbose else plan_words.SHOWN_LAYERS
    table = layout.table_of(
        plan_words.FLUSHED_HEADINGS,
        plan_words.flushed_rows(flushed, layers=shown),
        left=plan_words.FLUSHED_HEADINGS[1:2],
    )
    layout.titled(plan_words.flushed_title(flushed), table, console)
    layout.left_over(0 if shown is None else len(flushed.layers) - shown, "gradient", console)
