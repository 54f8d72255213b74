"""What a shell is offered for the value of an option that is no plain choice."""

from __future__ import annotations

from collections.abc import Iterable

from ampdoctor.diagnosis.catalogue import all_thresholds
from ampdoctor.evidence.targets import TARGETS
from ampdoctor.health.sinks.export import KINDS
from ampdoctor.reports.formats import FORMATS


def report_completions(incomplete: str) -> list[str]:
    """`FORMAT=`, after which the shell completes a file."""
    return _begun((f"{form}=" for form in FORMATS), incomplete)


def export_completions(incomplete: str) -> list[str]:
    """`KIND=`, after which comes where to."""
    return _begun((f"{kind.name}=" for kind in KINDS), incomplete)


def threshold_completions(incomplete: str) -> list[str]:
    """`CODE.NAME=` of every threshold."""
    return _begun((f"{key}=" for key in all_thresholds()), incomplete)


def hardware_completions(incomplete: str) -> list[str]:
    """What a precision is recommended for."""
    return _begun(TARGETS, incomplete)


def _begun(values: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]
