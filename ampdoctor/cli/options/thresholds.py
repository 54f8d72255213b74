"""The options by which a user moves thresholds, and what they come to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated

import typer

from ampdoctor.cli.options.completing import threshold_completions
from ampdoctor.diagnosis.catalogue import check_threshold, thresholds_from
from ampdoctor.errors import UsageError
from ampdoctor.evidence.thresholds import (
    ERROR_BAD,
    ERROR_NOTE,
    ERROR_WARNING,
    FLUSHED,
    FP32_SHARE,
    HORIZON,
    SKIP_RATE,
    Moves,
    Threshold,
    Thresholds,
)

SHORT: Mapping[str, Threshold] = MappingProxyType(
    {
        "tau": FLUSHED,
        "rho": SKIP_RATE,
        "error_note": ERROR_NOTE,
        "error_warning": ERROR_WARNING,
        "error_bad": ERROR_BAD,
        "fp32_share": FP32_SHARE,
        "horizon": HORIZON,
    }
)
"""By parameter of `AdviceThresholdOptions`: the threshold that it is another name of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdOptions:
    """Any threshold of any rule, by its full name."""

    threshold: Annotated[
        list[str],
        typer.Option(
            "--threshold",
            metavar="CODE.NAME=VALUE",
            help="Move a number of a rule (AMP107.saturated=0.1; `ampdoctor rule CODE` shows them); may be repeated.",
            autocompletion=threshold_completions,
        ),
    ] = field(default_factory=list)

    def thresholds(self, *below: Moves, typed: Collection[str] | None = None) -> Thresholds:
        """Return all thresholds as the workflows take them.

        Args:
            below: Values from elsewhere, over which the options win; a later one wins over those before it.
            typed: The options that the command line itself gives, which win over those from the environment or a
                configuration file; None: all of them.

        Raises:
            UsageError: One is not known, out of its range or given twice, or two contradict each other.
        """
        options = {option.name for option in fields(self)}
        here = options if typed is None else options.intersection(typed)
        return thresholds_from(*below, self.moves(options - here), self.moves(here))

    def moves(self, options: Collection[str]) -> Moves:
        """Return what these of the options ask for, as a configuration has it.

        Raises:
            UsageError: The form is another, or a threshold is given twice.
        """
        named = {code: dict(names) for code, names in parse_thresholds(self.threshold).items()}
        moves = named if "threshold" in options else {}
        for option, threshold in SHORT.items():
            value = getattr(self, option, None)
            if value is None or option not in options:
                continue
            if threshold.name in moves.get(threshold.code, {}):
                raise UsageError(f"{threshold.option} and --threshold {threshold.key} are one and the same: give one")
            moves.setdefault(threshold.code, {})[threshold.name] = value
        return moves


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceThresholdOptions(ThresholdOptions):
    """With short names for what counts as lost, as harmful, as too many in a recommendation."""

    tau: Annotated[
        float | None,
        typer.Option(
            "--tau",
            metavar="SHARE",
            help=f"Share of gradients that may flush to zero (AMP301) [default: {FLUSHED.default:g}].",
        ),
    ] = None
    rho: Annotated[
        float | None,
        typer.Option(
            "--rho",
            metavar="SHARE",
            help=f"Share of steps that a settled scaler may skip [default: {SKIP_RATE.default:g}].",
        ),
    ] = None
    error_note: Annotated[
        float | None,
        typer.Option(
            "--error-note",
            metavar="ERROR",
            help=f"Gradient error that is as good as bf16's (AMP301) [default: {ERROR_NOTE.default:g}].",
        ),
    ] = None
    error_warning: Annotated[
        float | None,
        typer.Option(
            "--error-warning",
            metavar="ERROR",
            help=f"Gradient error that makes training worse [default: {ERROR_WARNING.default:g}].",
        ),
    ] = None
    error_bad: Annotated[
        float | None,
        typer.Option(
            "--error-bad",
            metavar="ERROR",
            help=f"Gradient error at which training fails [default: {ERROR_BAD.default:g}].",
        ),
    ] = None
    fp32_share: Annotated[
        float | None,
        typer.Option(
            "--fp32-share",
            metavar="SHARE",
            help=f"Share of parameters that may go to fp32 (AMP303) [default: {FP32_SHARE.default:g}].",
        ),
    ] = None
    horizon: Annotated[
        int | None,
        typer.Option(
            "--horizon",
            metavar="N",
            help=f"Steps that a simulation looks ahead [default: {HORIZON.default}].",
        ),
    ] = None


def parse_thresholds(pairs: list[str]) -> Moves:
    """Return the values that `--threshold CODE.NAME=VALUE` names.

    Raises:
        UsageError: No `.` or `=`, a value that is no number or out of range, an unknown threshold, or one twice.
    """
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
