"""The options that commands share, each written once."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

from ampdoctor.diagnosis.catalogue import check_threshold, thresholds_from
from ampdoctor.errors import UsageError
from ampdoctor.evidence.targets import DEFAULT_TARGET, TARGETS, Framework
from ampdoctor.evidence.thresholds import Moves, Thresholds
from ampdoctor.health.sinks.export import KINDS, Export, export_of
from ampdoctor.reports.formats import Color, ReportFormat
from ampdoctor.workflows.requests import (
    HalfProducts,
    Policy,
    Precision,
    ReplayRequest,
    SetAside,
    suppress_all,
)

ListFormat = Literal["human", "json"]  # for output that is not a report: a rule's page, the environment
REPORT_AND_CI = "Report and CI (the same for every command)"
"""The part of the help with the options that every command has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where the report goes, in which form, and whose settings hold: the last three are `ConfiguredCommand`'s."""

    all_have: ClassVar[Mapping[str, Any]] = {"rich_help_panel": REPORT_AND_CI}

    format: Annotated[ReportFormat, typer.Option("--format", help="Form of the report.")] = "human"
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Write the report here instead of to stdout.")
    ] = None
    report: Annotated[
        list[str],
        typer.Option("--report", metavar="FORMAT=FILE", help="Also write the report in this form; may be repeated."),
    ] = field(default_factory=list)
    github_summary: Annotated[
        bool,
        typer.Option("--github-summary", help="Also append the report to the summary of the step of GitHub Actions."),
    ] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Findings only; no progress.")] = False
    verbose: Annotated[
        int,
        typer.Option(
            "-v", "--verbose", count=True, min=0, show_default=False, help="More evidence; -vv: our own tracebacks."
        ),
    ] = 0
    color: Annotated[Color, typer.Option("--color", help="auto: colour on a terminal, as NO_COLOR etc. say.")] = "auto"
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress on stderr.")] = False
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            allow_from_autoenv=False,
            metavar="FILE",
            help="Settings from here [default: the nearest ampdoctor.toml or pyproject.toml].",
        ),
    ] = None
    isolated: Annotated[
        bool, typer.Option("--isolated", allow_from_autoenv=False, help="Read no configuration file.")
    ] = False
    show_config: Annotated[
        bool,
        typer.Option(
            "--show-config",
            allow_from_autoenv=False,
            help="Show every setting and where it comes from; examine nothing.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """For whom the advice is."""

    emit: Annotated[
        Framework | None,
        typer.Option("--emit", help="Print the settings for this framework, whose scaler is then simulated."),
    ] = None
    hardware: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="HARDWARE",
            help=f"Recommend a precision for: {', '.join(TARGETS)}.",
        ),
    ] = DEFAULT_TARGET
    precision_matters: Annotated[
        bool,
        typer.Option("--precision-matters", help="bf16's 8 bits are too few (training and sampling must agree)."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a run is replayed."""

    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="PATH", help="Read without executing anything; loaded before step 0."),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Optimizer steps to replay, at most as there are batches [default: 8 for bisect-nan, else 50].",
        ),
    ] = None
    precision: Annotated[Precision | None, typer.Option("--precision", help="Overrides the run's own.")] = None
    policy: Annotated[
        Policy | None,
        typer.Option(
            "--policy",
            help="Autocast on a CPU: as CUDA does it, or the CPU's own [default: cuda; a bundle's own].",
        ),
    ] = None
    half_products: Annotated[
        HalfProducts,
        typer.Option(
            "--half-products",
            hidden=True,
            help="fp16 matmuls on a CPU. fp32: computed in fp32 and rounded, as a GPU does. plain: the CPU's own.",
        ),
    ] = "fp32"
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:<index>.")] = "auto"
    spill: Annotated[
        bool,
        typer.Option("--spill", help="Keep what is put back between replays on disk (TMPDIR), not in memory."),
    ] = False
    arg: Annotated[
        list[str], typer.Option("--arg", metavar="KEY=JSON", help="An argument of the factory; may be repeated.")
    ] = field(default_factory=list)
    app_dir: Annotated[
        str | None,
        typer.Option("--app-dir", metavar="FOLDER", help="First on the factory's import path [default: here]."),
    ] = None
    batches: Annotated[
        str | None,
        typer.Option("--batches", metavar="MODULE:NAME", help="The batches, where the factory returns a bare module."),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option("--loss", metavar="MODULE:NAME", help="loss(model, batch), where the factory returns a module."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="SPEC", help="What makes a bundle's model: FILE.py:function, :Class, FILE.py."),
    ] = None
    expect_failure: Annotated[
        bool,
        typer.Option(
            "--expect-failure", help="The run is known to fail: a clean replay is 'not reproduced' and exits with 2."
        ),
    ] = False

    def inputs(self, target: str) -> list[str]:
        """Return the files and folders that the arguments name and the command may read."""
        named = [part for part in (target, self.batches, self.loss, self.model) if part is not None]
        files = [file for part in named for file in (part, part.rpartition(":")[0]) if Path(file).is_file()]
        return files if self.checkpoint is None else [*files, self.checkpoint]

    def request(self, factory: str, *, allow_partial: bool, script_arguments: tuple[str, ...] = ()) -> ReplayRequest:
        """Return the request for the workflows."""
        given = {option.name: getattr(self, option.name) for option in fields(self) if option.name != "arg"}
        return ReplayRequest(
            factory=factory,
            arguments=parse_arguments(self.arg),
            script_arguments=script_arguments,
            allow_partial=allow_partial,
            **given,
        )


def refuse_empty(name: str, value: Any) -> None:
    """Raise UsageError for an empty or blank text, as an unset variable of a script gives."""
    if isinstance(value, str) and not value.strip():
        raise UsageError(f"{name} is empty: is a variable of the script not set?")


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """Return the keyword arguments of `--arg KEY=JSON`; raises UsageError for an invalid or repeated one."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--arg {pair}: the form is KEY=JSON, where KEY is an argument of the factory")
        if key in arguments:
            raise UsageError(f"--arg {key}: given twice")
        arguments[key] = _value(pair, key, text)
    return arguments


def _value(pair: str, key: str, text: str) -> Any:
    def refuse(constant: str) -> None:
        raise UsageError(f"--arg {pair}: {constant} is not JSON; give the factory a string and let it make the number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        quoted = json.dumps(text)
        raise UsageError(f"--arg {key}: the value is not JSON; a string needs quotes: '{key}={quoted}'") from None


# -- one Typer option per field of an options dataclass --

SCRIPTS_OWN = "ARGS"  # the arguments of a user's script, which may be empty

R = TypeVar("R")


def flatten(function: Callable[..., R]) -> Callable[..., R]:
    """Return `function` with each dataclass parameter replaced by its fields, which carry Typer's `Annotated`."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            groups[name] = hint
            parameters += _options_of(hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    named = {parameter.name: _named(parameter) for parameter in parameters}

    @functools.wraps(function)
    def command(**values: Any) -> R:
        for name, value in values.items():
            for text in value if isinstance(value, list) and named[name] != SCRIPTS_OWN else [value]:
                refuse_empty(named[name], text)
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**values, **built)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _named(parameter: inspect.Parameter) -> str:
    """Return an option with its dashes, or what the help calls an argument."""
    told = next((one for one in get_args(parameter.annotation) if isinstance(one, ParameterInfo)), None)
    first = next((str(one) for one in (getattr(told, "default", ""), *(getattr(told, "param_decls", None) or ()))), "")
    return first if first.startswith("--") else str(getattr(told, "metavar", None) or parameter.name)


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    """Return the options of a group, each with what `all_have` says of the group's."""
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        for name, value in getattr(group, "all_have", {}).items():
            setattr(get_args(hints[one.name])[1], name, value)
    return [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=_default(one), annotation=hints[one.name])
        for one in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


# -- gates: which findings fail a run, and which are already known --

FailOn = Literal["error", "warning", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """How the report becomes an exit code."""

    all_have: ClassVar[Mapping[str, Any]] = {"rich_help_panel": REPORT_AND_CI}

    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="Exit with 1 for findings of this severity and worse.")
    ] = "error"
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 where findings would exit with 1; other codes stay.")
    ] = False
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Accept a checkpoint that fits the model only in part, and an incomplete report that has a verdict.",
        ),
    ] = False
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FILE", help="Set aside what is known there; only what is new counts."),
    ] = None
    write_baseline: Annotated[
        str | None,
        typer.Option(
            "--write-baseline",
            allow_from_autoenv=False,  # as a setting, it would make every run its own baseline
            metavar="FILE",
            help="Write what is found as the baseline: from now on known.",
        ),
    ] = None

    def lived_with(self, set_aside: SetAside) -> SetAside:
        """Return the failures that a replay continues past: suppressed ones; with --write-baseline, all."""
        return set_aside if self.write_baseline is None else lambda report: suppress_all(set_aside(report))


# -- exports --

_KINDS = ", ".join(f"{kind.name}={kind.target}" for kind in KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Where the numbers and alerts of a log are exported."""

    export: Annotated[
        list[str],
        typer.Option(
            "--export",
            metavar="KIND=TARGET",
            help=f"Also show the log's numbers and alerts there; may be repeated: {_KINDS}.",
        ),
    ] = field(default_factory=list)

    def exports(self) -> tuple[Export, ...]:
        """Return the exports; raises UsageError where one is invalid or its library is not installed."""
        return tuple(export_of(text) for text in self.export)


def files_of(exports: Iterable[Export]) -> tuple[str, ...]:
    """Return the files that exports write in existing folders; files in new folders overwrite nothing."""
    return tuple(file for one in exports for file in one.files() if Path(file).parent.is_dir())


# -- thresholds --


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdOptions:
    """Any threshold of any rule, by its full name."""

    threshold: Annotated[
        list[str],
        typer.Option(
            "--threshold",
            metavar="NAME=VALUE",
            help="Move a knob, or a number of a rule (AMP107.saturated=0.1; `ampdoctor rule AMP107` shows them); may "
            "be repeated.",
        ),
    ] = field(default_factory=list)

    def thresholds(self, *below: Moves) -> Thresholds:
        """Return all thresholds for the workflows; later values of `below` override earlier ones, the option all.

        Raises UsageError where a threshold is unknown, out of range or given twice, or where two contradict each other.
        """
        return thresholds_from(*below, parse_thresholds(self.threshold))


def parse_thresholds(pairs: list[str]) -> Moves:
    """Return the values of `--threshold CODE.NAME=VALUE`; raises UsageError for an invalid or repeated one."""
    moves: dict[str, dict[str, float]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        code, dot, name = key.strip().partition(".")
        if not (code and dot and name and equals):
            raise UsageError(f"--threshold {pair}: the form is CODE.NAME=VALUE, for example AMP107.saturated=0.1")
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"--threshold {pair}: {text!r} is no number") from None
        try:
            check_threshold(code.upper(), name, value)
        except UsageError as error:
            raise UsageError(f"--threshold {pair}: {error}") from None
        names = moves.setdefault(code.upper(), {})
        if name in names:
            raise UsageError(f"--threshold {key.strip()}: given twice")
        names[name] = value
    return moves
