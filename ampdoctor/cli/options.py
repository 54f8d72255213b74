"""The options that commands share, each written once."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from typer import Option
from typer.models import OptionInfo, ParameterInfo

from ampdoctor.diagnosis.catalogue import check_threshold, thresholds_from
from ampdoctor.errors import UsageError
from ampdoctor.evidence.thresholds import Moves, Thresholds
from ampdoctor.health.sinks.export import KINDS, Export, export_of
from ampdoctor.reports.formats import Color, ReportFormat
from ampdoctor.workflows.requests import HalfProducts, Policy, Precision, ReplayRequest, SetAside, suppress_all

ListFormat = Literal["human", "json"]  # for output that is not a report: a rule's page, the environment
REPORT_AND_CI = "Report and CI (the same for every command)"
"""The part of the help with the options that every command has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where the report goes, in which form, and whose settings hold: the last three are `ConfiguredCommand`'s."""

    all_have: ClassVar[Mapping[str, Any]] = {"rich_help_panel": REPORT_AND_CI}

    format: Annotated[ReportFormat, Option(help="Form of the report.")] = "human"
    output: Annotated[str | None, Option(metavar="FILE", help="Write the report here instead of to stdout.")] = None
    report: Annotated[
        list[str], Option(metavar="FORMAT=FILE", help="Also write the report in this form; may be repeated.")
    ] = field(default_factory=list)
    github_summary: Annotated[
        bool, Option("--github-summary", help="Also append the report to the summary of the step of GitHub Actions.")
    ] = False
    quiet: Annotated[bool, Option("-q", "--quiet", help="Findings only; no progress.")] = False
    verbose: Annotated[
        int,
        Option(
            "-v", "--verbose", count=True, min=0, show_default=False, help="More evidence; -vv: our own tracebacks."
        ),
    ] = 0
    color: Annotated[Color, Option(help="auto: colour on a terminal, as NO_COLOR etc. say.")] = "auto"
    no_progress: Annotated[bool, Option("--no-progress", help="No progress on stderr.")] = False
    config: Annotated[
        str | None,
        Option(
            allow_from_autoenv=False,
            metavar="FILE",
            help="Settings from here [default: the nearest ampdoctor.toml or pyproject.toml].",
        ),
    ] = None
    isolated: Annotated[bool, Option("--isolated", allow_from_autoenv=False, help="Read no configuration file.")] = (
        False
    )
    show_config: Annotated[
        bool,
        Option(
            "--show-config",
            allow_from_autoenv=False,
            help="Show every setting and where it comes from; examine nothing.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a run is replayed."""

    checkpoint: Annotated[
        str | None, Option(metavar="PATH", help="Read without executing anything; loaded before step 0.")
    ] = None
    steps: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="Optimizer steps to replay, at most as there are batches [default: 8 for bisect-nan, else 50].",
        ),
    ] = None
    precision: Annotated[Precision | None, Option(help="Overrides the run's own.")] = None
    policy: Annotated[
        Policy | None,
        Option(help="Autocast on a CPU: as CUDA does it, or the CPU's own [default: cuda; a bundle's own]."),
    ] = None
    half_products: Annotated[
        HalfProducts,
        Option(
            hidden=True,
            help="fp16 matmuls on a CPU. fp32: computed in fp32 and rounded, as a GPU does. plain: the CPU's own.",
        ),
    ] = "fp32"
    device: Annotated[str, Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:<index>.")] = "auto"
    spill: Annotated[
        bool, Option("--spill", help="Keep what is put back between replays on disk (TMPDIR), not in memory.")
    ] = False
    arg: Annotated[list[str], Option(metavar="KEY=JSON", help="An argument of the factory; may be repeated.")] = field(
        default_factory=list
    )
    app_dir: Annotated[
        str | None, Option(metavar="FOLDER", help="First on the factory's import path [default: here].")
    ] = None
    batches: Annotated[
        str | None, Option(metavar="MODULE:NAME", help="The batches, where the factory returns a bare module.")
    ] = None
    loss: Annotated[
        str | None, Option(metavar="MODULE:NAME", help="loss(model, batch), where the factory returns a module.")
    ] = None
    model: Annotated[
        str | None, Option(metavar="SPEC", help="What makes a bundle's model: FILE.py:function, :Class, FILE.py.")
    ] = None
    expect_failure: Annotated[
        bool,
        Option(
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
    if isinstance(told, OptionInfo):
        names = (str(one) for one in (told.default, *(told.param_decls or ())))
        return next((one for one in names if one.startswith("--")), f"--{parameter.name.replace('_', '-')}")
    return str(getattr(told, "metavar", None) or parameter.name)


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    """Return the options of a group, each with what `all_have` says of the group's."""
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        for name, value in getattr(group, "all_have", {}).items():
            setattr(get_args(hints[one.name])[1], name, value)
    parameters = []
    for one in fields(group):
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        default = default if one.default_factory is MISSING else one.default_factory()
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(one.name, kind, default=default, annotation=hints[one.name]))
    return parameters


# -- gates: which findings fail a run, and which are already known --

FailOn = Literal["error", "warning", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """How the report becomes an exit code."""

    all_have: ClassVar[Mapping[str, Any]] = {"rich_help_panel": REPORT_AND_CI}

    fail_on: Annotated[FailOn, Option(help="Exit with 1 for findings of this severity and worse.")] = "error"
    exit_zero: Annotated[
        bool, Option("--exit-zero", help="Exit with 0 where findings would exit with 1; other codes stay.")
    ] = False
    allow_partial: Annotated[
        bool,
        Option(
            "--allow-partial",
            help="Accept a checkpoint that fits the model only in part, and an incomplete report that has a verdict.",
        ),
    ] = False
    baseline: Annotated[
        str | None, Option(metavar="FILE", help="Set aside what is known there; only what is new counts.")
    ] = None
    write_baseline: Annotated[
        str | None,
        Option(
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
        Option(metavar="KIND=TARGET", help=f"Also show the log's numbers and alerts there; may be repeated: {_KINDS}."),
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
        Option(
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
        key, _, text = pair.partition("=")
        code, _, name = key.strip().partition(".")
        code = code.upper()
        try:
            check_threshold(code, name, value := float(text))
        except ValueError:
            raise UsageError(f"--threshold {pair}: {text!r} is no number") from None
        except UsageError as error:
            raise UsageError(f"--threshold {pair}: {error}") from None
        names = moves.setdefault(code, {})
        if name in names:
            raise UsageError(f"--threshold {key.strip()}: given twice")
        names[name] = value
    return moves
