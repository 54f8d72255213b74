"""`ampdoctor rule`, `ampdoctor env` and `ampdoctor merge`."""

from __future__ import annotations

import platform
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ampdoctor.cli.options import GateOptions, ListFormat, OutputOptions, flatten
from ampdoctor.cli.output import canvas
from ampdoctor.cli.process import read_text, report_stream, write_stdout
from ampdoctor.cli.run_command import Action, Outcome, run_command
from ampdoctor.diagnosis.catalogue import Rule, find_rule, rules
from ampdoctor.errors import EXIT_OK, ReportError
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.software import installed, machine, packages, variables
from ampdoctor.package import version
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import Color
from ampdoctor.workflows.requests import Progress, SetAside

if TYPE_CHECKING:
    from rich.console import Console


def rule(
    code: Annotated[
        str | None, Argument(metavar="CODE", help="A code (AMP201) or a name (forward-overflow); without: all.")
    ] = None,
    form: Annotated[ListFormat, Option("--format", help="Form of the page.")] = "human",
    color: Annotated[Color, Option(help="auto: colour on a terminal, as NO_COLOR etc. say.")] = "auto",
) -> Action:
    """Explain a finding's code.

    What it means, how it is decided, what to do, and where it is known to be wrong.
    """

    def action() -> Outcome:
        chosen = list(rules().values()) if code is None else [find_rule(code)]
        if form == "json":
            from ampdoctor.reports.json_report import strict_json

            write_stdout(strict_json([_whole(rule) for rule in chosen]))
        else:
            pages = partial(_show, chosen, whole=code is not None)
            write_stdout(canvas(report_stream(), color=color).draw(pages))
        return Outcome(EXIT_OK)

    return action


def _whole(rule: Rule) -> dict[str, Any]:
    said = ("name", "default", "unit", "lowest", "highest", "why")
    thresholds = [{key: getattr(threshold, key) for key in said} for threshold in rule.thresholds]
    named = {"code": rule.code, "name": rule.name, "title": rule.title, "worst": rule.worst}
    return {**named, **rule.page.texts, "thresholds": thresholds}


def _show(chosen: list[Rule], console: Console, *, whole: bool) -> None:
    from rich.text import Text

    for rule in chosen:
        console.print(Text(f"{rule.code} {rule.name}", "bold") + Text(f": {rule.title}"))
        for heading, text in {"worst": rule.worst, **rule.page.texts}.items() if whole else ():
            console.print(Text(f"\n{heading}", "bold"))
            console.print(Text(text))
        if whole and rule.thresholds:
            console.print(Text("\nthresholds, to be moved with --threshold CODE.NAME=VALUE", "bold"))
            for one in rule.thresholds:
                range_ = f"{one.unit}, {one.lowest:g} to {one.highest:g}"
                console.print(Text(f"{one.key} = {one.default:g} ({range_}): {one.why}"))


def env(form: Annotated[ListFormat, Option("--format", help="Form of the list.")] = "human") -> Action:
    """List what to paste into a bug report.

    Versions, devices, and the settings that change numbers; nothing else of the environment is shown.
    """

    def action() -> Outcome:
        encoding = getattr(report_stream(), "encoding", None)
        facts = {**machine(), "stdout_encoding": encoding, **packages(), **_torch(), **variables()}
        if form == "json":
            from ampdoctor.reports.json_report import strict_json

            write_stdout(strict_json(facts))
        else:
            write_stdout("".join(f"{name}: {sanitise(_shown(fact))}\n" for name, fact in facts.items()))
        return Outcome(EXIT_OK)

    return action


def versions() -> str:
    """Return one line with the versions of the tool, torch and Python, without importing torch."""
    torch = installed("torch") or "not installed"
    return f"ampdoctor {version()} (torch {torch}, Python {platform.python_version()})"


def _torch() -> dict[str, Any]:
    try:
        import torch  # noqa: F401 - first and alone: this page must also show that torch cannot be imported
    except Exception as error:  # noqa: BLE001
        return {"torch_import": f"{type(error).__name__}: {error}"}
    from ampdoctor.precision.spec import device_facts, torch_facts

    return {"torch_import": "ok", **torch_facts(), **device_facts()}


def _shown(fact: Any) -> str:
    if fact is None:
        return "none"
    return "; ".join(fact) or "none" if isinstance(fact, list) else str(fact)


_MAX_REPORT = 256 * 1024 * 1024  # bytes; a report with a histogram for each of 1,000 modules has some 10 MB


@flatten
def merge(
    reports: Annotated[
        list[str], Argument(metavar="REPORT", help="Reports that were written with --format json or jsonl.")
    ],
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Show reports again, in any form; several become one.

    Several are those of the ranks of one job: a finding of more than one rank is there once, with its ranks. Under
    torchrun rank 0 writes as it is told, and rank N its report to rankN.jsonl, in the folder of --output or here; give
    every rank --exit-zero, for torchrun ends the others when one exits with 1, and let `merge` judge. `run` needs no
    --exit-zero there, and keeps rank N's report beside its log, in report.rankN.jsonl.
    """

    def work(_: Progress | None, __: SetAside) -> Report:
        from ampdoctor.reports.read_json import merge_reports, report_from_text

        read = []
        for file in reports:
            text = read_text(file, limit=_MAX_REPORT, what="the report")
            try:
                read.append(report_from_text(text))
            except ReportError as error:
                raise ReportError(f"{file}: {error}") from None
        return merge_reports(read)

    return partial(run_command, work, output, gates, reports)
