"""The commands that run nothing of the user's: `ampdoctor scan`, `merge`, `rule` and `env`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from ampdoctor.cli.configured_command import moved_in_the_file
from ampdoctor.cli.options import GateOptions, ListFormat, OutputOptions, ThresholdOptions, flatten
from ampdoctor.cli.output import canvas
from ampdoctor.cli.process import loading, read_text, report_stream, write_stdout
from ampdoctor.cli.run_command import Action, Outcome, run_command
from ampdoctor.diagnosis.catalogue import Rule, find_rule, rules
from ampdoctor.errors import EXIT_OK, ReportError, UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.software import installed, machine, packages, variables
from ampdoctor.package import version
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import Color
from ampdoctor.workflows.requests import Progress, SetAside

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """Which parts of a checkpoint are read, and how closely."""

    against: Annotated[
        str | None, Option(metavar="OLD", help="An earlier checkpoint of the training: what moved since?")
    ] = None
    every: Annotated[
        bool, Option("--all", help="Of a folder of many read every checkpoint, not only what a search needs.")
    ] = False
    listing: Annotated[bool, Option("--list", help="Show what lies in it, without reading tensors or judging.")] = False
    jobs: Annotated[
        int | None, Option(hidden=True, min=1, max=256, help="Threads that read and examine; none: torch's.")
    ] = None
    exact: Annotated[
        bool, Option("--exact", hidden=True, help="true: sort every element, not a sample of large tensors.")
    ] = False
    skip_lfs_pointers: Annotated[
        bool, Option("--skip-lfs-pointers", help="Leave Git LFS pointers out, where they would be errors.")
    ] = False

    def refuse_contradictions(self, paths: list[str]) -> None:
        """Raise UsageError for options that contradict each other, or the number of paths."""
        of_one = {"--list": self.listing, "--against": self.against is not None, "--all": self.every}
        given = [option for option, typed in of_one.items() if typed]
        tensors = {**of_one, "--threshold exact": self.exact, "--list": False}
        for option in (option for option, typed in tensors.items() if typed and self.listing):
            raise UsageError(f"--list reads no tensors, so that {option} has nothing to do: give one of the two")
        if self.against is not None and self.every:
            raise UsageError("--against compares two checkpoints and --all reads a folder of many: give one of the two")
        if given and len(paths) > 1:
            raise UsageError(f"{given[0]} takes one PATH, and {len(paths)} were given: run it once for each")
        if given and self.skip_lfs_pointers:
            raise UsageError(f"--skip-lfs-pointers does not go with {given[0]}: leave one of the two out")


@flatten
def scan(
    context: Context,
    paths: Annotated[
        list[str],
        Argument(
            metavar="PATH", help="A checkpoint: a file, or the folder of one or of many of one training. Or several."
        ),
    ],
    *,
    asked: ScanOptions,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Examine a checkpoint, without the model's code.

    Nothing that the checkpoint holds is ever executed. Of a folder of many checkpoints the first sick one is found by
    halving.
    """
    thresholds = limits.thresholds(moved_in_the_file(context))
    asked.refuse_contradictions(paths)

    def work(progress: Progress | None, set_aside: SetAside) -> Report:
        """Run the scan; each workflow is imported only where it is needed, so that `--help` is fast."""
        if asked.listing:
            with loading():
                from ampdoctor.workflows.scan_checkpoint import list_structure

            return list_structure(paths[0])
        how: dict[str, Any] = {"progress": progress, "jobs": asked.jobs, "exact": asked.exact, "thresholds": thresholds}
        if asked.against is not None:
            with loading():
                from ampdoctor.workflows.scan_against import compare

            return compare(paths[0], asked.against, **how)
        how |= {"whole": gates.write_baseline is not None, "set_aside": set_aside}  # a baseline holds every checkpoint
        with loading():
            from ampdoctor.workflows import scan as workflow

        if len(paths) > 1 or asked.skip_lfs_pointers:
            return workflow.scan_several(paths, skip_lfs_pointers=asked.skip_lfs_pointers, **how)
        return workflow.scan(paths[0], every_member=asked.every, **how)

    return partial(run_command, work, output, gates, paths if asked.against is None else [*paths, asked.against])


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
