"""Interventions: changes that only the user's code can make, tried at the line of a birth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.evidence.of_runs.trace import LOST
from ampdoctor.evidence.report import Prescription
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.probes.altering.intervene import Address, How, Intervention, address_of

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Birth
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.proving.changes import Change
    from ampdoctor.workflows.proving.trials import Trials

FP32_MAX = FORMATS["fp32"].max
Way = tuple[How, Sequence[Address]]
"""What is changed, and where."""


def intervene(births: Sequence[Birth], trials: Trials, *, first_only: bool = False) -> Prescription:
    """Try the change at the line of the first birth (and of the others) until a replay cures, or all were tried.

    Args:
        births: The independent births; the first one's numbers decide what is tried.
        trials: The trials of their step.
        first_only: Try one change only, because another remedy is verified already.
    """
    address = address_of(births[0])
    if address is None:
        return Prescription(
            kind="code",
            value="change the op",
            status="not_run",
            detail="change the op",
            reason="no line of the user's code runs the op, so nothing can be put in its place",
        )
    addresses = [a for a in map(address_of, births) if a is not None]
    lost_at = _lost_at(births[0])
    ways: list[Way] = [(how, addresses) for how in _ways(births[0])]
    ways += [("line_fp32", [lost_at, *addresses])] if lost_at is not None else []
    return intervene_at(ways[:1] if first_only else ways, trials)


def intervene_at(ways: Sequence[Way], trials: Trials) -> Prescription:
    """Try changes at lines until a replay cures; else the first of them.

    Args:
        ways: What is changed, and where; at least one.
        trials: The trials of the step.
    """
    tried: list[Prescription] = []
    for how, places in ways:
        tried.append(_attempt(places, how, trials))
        if tried[-1].status == "intervention":
            return tried[-1]
    return tried[0]


def _ways(birth: Birth) -> tuple[How, ...]:
    """Returns what may help, likeliest first, from the op's recomputation in float64 on the same inputs."""
    verdict = birth.recomputed
    if any(stats.dtype.startswith("float8") for stats in birth.outputs):
        return ("guard", "fp32")  # the cast to FP8 is intended: its input must be kept in range
    if verdict is not None and not verdict.finite:
        return ("guard", "line_fp32", "line_guard")
    if verdict is not None and verdict.amax > FP32_MAX:
        return ("fp64", "line_fp64", "guard")
    if birth.where.phase == "backward":
        return ("line_fp32", "fp32", "guard")  # the derivative must stay wide until it has left the line
    return ("fp32", "line_fp32", "guard")


def _lost_at(birth: Birth) -> Address | None:
    """Returns the line whose narrow format lost what the birth needs, if it is another line."""
    operand = birth.operand
    if operand is None or operand.made_by not in LOST or operand.op is None:
        return None
    if operand.source is None or operand.source in (birth.where.source, birth.where.forward_source):
        return None
    return Address(operand.source, operand.op.removeprefix("aten."))


def _attempt(addresses: Sequence[Address], how: How, trials: Trials) -> Prescription:
    """Try one way; in a model that is half throughout, the result may have to become half again for later ops."""
    for narrow in (False, True):
        mode = Intervention(addresses, how, narrow=narrow)
        detail = _words(addresses, how, mode)
        result = trials.attempt("code", detail, _change(mode), detail, stands_in=True)
        if addresses[0] not in mode.met:
            return replace(result, status="not_run", reason="the replay did not meet the op at that line again")
        if result.status == "not_run":
            continue
        break
    counts = result.detail.removeprefix(detail)
    detail = _words(addresses, how, mode)
    if result.status == "failed" and addresses[0] in mode.helpless:
        result = replace(result, reason=f"{result.reason}; no bound on its operands makes the op finite")
    return replace(result, value=detail, detail=detail + counts)


def _change(mode: Intervention) -> Change:
    @contextmanager
    def change(session: Session) -> Iterator[None]:  # noqa: ARG001 - the seam's signature
        with mode.watching():
            yield

    return change


def _words(addresses: Sequence[Address], how: How, mode: Intervention) -> str:
    """Returns what to write, and where."""
    address = addresses[0]
    place, *others = dict.fromkeys(f"{one.source.file}:{one.source.line}" for one in addresses)
    too = f", and {' and '.join(others)} as well" if others else ""
    op = f"aten.{address.op}"
    guards = [f"aten.{name}: {guard.words}" for (at, name), guard in mode.guards.items() if at == address]
    if guards:
        return f"{place}: in float32; {'; '.join(guards)}"
    beyond = f"{op} exceeds float32 too: rewrite"
    return {
        "guard": f"{place}: run {op} in float32 (autocast off, inputs .float()), and guard its operands",
        "line_guard": f"{place}: compute this line in float32, and guard the operands of its ops",
        "fp32": f"{place}: run {op} in float32 (autocast off, inputs .float(), result left in float32)",
        "line_fp32": f"{place}: compute this line in float32 (autocast off, inputs .float()){too}",
        "fp64": f"{place}: {beyond} the formula (in log space); in float64 the step is right",
        "line_fp64": f"{place}: {beyond} this line (in log space); in float64 the step is right",
    }[how]
