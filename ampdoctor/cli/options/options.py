"""The options that commands share, each written once."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ampdoctor.cli.options.completing import hardware_completions, report_completions
from ampdoctor.errors import UsageError
from ampdoctor.evidence.targets import DEFAULT_TARGET, TARGETS, Framework
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.reports.formats import Color, ReportFormat
from ampdoctor.workflows.requests import HalfProducts, Policy, Precision, ReplayRequest, is_profile

ListFormat = Literal["human", "json"]
"""Of what is no report: a rule's page, the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where the report goes, and in which form."""

    format: Annotated[ReportFormat, typer.Option("--format", help="Form of the report.")] = "human"
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Write the report here instead of to stdout.")
    ] = None
    report: Annotated[
        list[str],
        typer.Option(
            "--report",
            metavar="FORMAT=FILE",
            help="Also write the report in this form; may be repeated.",
            autocompletion=report_completions,
        ),
    ] = field(default_factory=list)
    github_summary: Annotated[
        bool,
        typer.Option("--github-summary", help="Also append the report to the summary of the step of GitHub Actions."),
    ] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Findings only; no progress.")] = False
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            min=0,
            show_default=False,
            help="More evidence; -vv: tracebacks of our own errors.",
        ),
    ] = 0
    color: Annotated[Color, typer.Option("--color", help="auto: colour on a terminal, as NO_COLOR etc. say.")] = "auto"
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress on stderr.")] = False

    def __post_init__(self) -> None:
        refuse_empty("--output", self.output)


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
            autocompletion=hardware_completions,
        ),
    ] = DEFAULT_TARGET
    precision_matters: Annotated[
        bool,
        typer.Option("--precision-matters", help="bf16's 8 bits are too few (training and sampling must agree)."),
    ] = False
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Processes that the training averages gradients over.")
    ] = 1
    reduce_fp16: Annotated[
        Literal["before", "after", "split"] | None,
        typer.Option("--reduce-fp16", help="Gradients are reduced in fp16, divided before or after the sum, or both."),
    ] = None
    accumulation: Annotated[
        int | None,
        typer.Option("--accumulation", metavar="N", min=1, help="Micro-batches a step of the training, if others."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a run is replayed."""

    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="PATH", help="Read inertly, and loaded into the run before step 0."),
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
        typer.Option("--half-products", help="fp16 products on a CPU: by fp32 kernels, rounded once, or its own."),
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

    def __post_init__(self) -> None:
        for option, value in (
            ("--checkpoint", self.checkpoint),
            ("--app-dir", self.app_dir),
            ("--batches", self.batches),
            ("--loss", self.loss),
            ("--model", self.model),
        ):
            refuse_empty(option, value)

    def inputs(self, target: str) -> list[str]:
        """Return the files and folders that the command may read, as far as its arguments name them."""
        named = [part for part in (target, self.batches, self.loss, self.model) if part is not None]
        files = [file for part in named for file in (part, part.rpartition(":")[0]) if Path(file).is_file()]
        return files if self.checkpoint is None else [*files, self.checkpoint]

    def target(
        self,
        targets: list[str],
        thresholds: Thresholds,
        *,
        allow_partial: bool,
        typed: Collection[str],
        advice: AdviceOptions | None = None,
        script_arguments: tuple[str, ...] = (),
    ) -> tuple[ReplayRequest, list[str]]:
        """Return what the workflows take, and the saved profiles where those are the target.

        Args:
            targets: As they were typed.
            thresholds: What counts as lost, as harmful, as too many.
            allow_partial: A checkpoint may fit the model only in part.
            typed: The parameters that the command line itself gives.
            advice: For whom the advice is.
            script_arguments: Those of the user's script.

        Raises:
            UsageError: Several targets, and not all of them are profiles; or options of a replay where nothing runs.
        """
        for target in targets:
            refuse_empty("TARGET", target)
        files = [target for target in targets if is_profile(target)]
        if len(targets) > 1 and len(files) < len(targets):
            other = next(target for target in targets if target not in files)
            raise UsageError(f"{other} is no saved profile: one factory, or one or more profiles of one run")
        given = [*self._given(typed), *(["what follows --"] if script_arguments else [])]
        if files and given:
            raise UsageError(f"{', '.join(given)}: only for a replay, and a saved profile runs nothing")
        request = self.request(targets[0], allow_partial=allow_partial, script_arguments=script_arguments)
        request = replace(request, thresholds=thresholds)
        if advice is not None:
            request = replace(
                request,
                emit=advice.emit,
                target=advice.hardware,
                precision_matters=advice.precision_matters,
                ranks=advice.ranks,
                reduce_fp16=advice.reduce_fp16,
                accumulation=advice.accumulation,
            )
        return request, files

    def _given(self, typed: Collection[str]) -> list[str]:
        """Those of its options that were typed: a setting is there for the runs that it fits."""
        return [f"--{option.name.replace('_', '-')}" for option in fields(self) if option.name in typed]

    def request(self, factory: str, *, allow_partial: bool, script_arguments: tuple[str, ...] = ()) -> ReplayRequest:
        """Return what the workflows take."""
        return ReplayRequest(
            factory=factory,
            arguments=parse_arguments(self.arg),
            script_arguments=script_arguments,
            checkpoint=self.checkpoint,
            steps=self.steps,
            precision=self.precision,
            policy=self.policy,
            half_products=self.half_products,
            device=self.device,
            app_dir=self.app_dir,
            allow_partial=allow_partial,
            batches=self.batches,
            loss=self.loss,
            model=self.model,
            expect_failure=self.expect_failure,
            spill=self.spill,
        )


def refuse_empty(name: str, value: str | None) -> None:
    """Refuse the empty string that an unset variable of a script becomes.

    Raises:
        UsageError: `value` is empty or blank.
    """
    if value is not None and not value.strip():
        raise UsageError(f"{name} is empty: is a variable of the script not set?")


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """Return the keyword arguments that `--arg KEY=JSON` names.

    Raises:
        UsageError: No `=`, a key that is no Python name, a key twice, or a value that is not JSON.
    """
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
    except json.JSONDecodeError:
        quoted = json.dumps(text)
        raise UsageError(f"--arg {key}: the value is not JSON; a string needs quotes: '{key}={quoted}'") from None
    except RecursionError:
        raise UsageError(f"--arg {key}: the value is nested too deeply") from None
    except ValueError:  # Python reads no integer of more than some thousand digits
        raise UsageError(f"--arg {key}: a number in the value has too many digits") from None
