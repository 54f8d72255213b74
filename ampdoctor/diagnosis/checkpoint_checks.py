"""What was looked at in a checkpoint and how near it came to a limit: the body of a healthy report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.checkpoint_rules import FP16_MAX, is_mask
from ampdoctor.evidence.checkpoint import DEAD_SCALE, CheckpointSummary, RoleSummary, TensorRole, TensorSummary
from ampdoctor.evidence.report import Check, Finding

_FINITE: tuple[tuple[str, str, TensorRole], ...] = (
    ("finite weights", "AMP101", "weight"),
    ("finite buffers", "AMP102", "buffer"),
    ("finite optimizer state", "AMP103", "moment"),
    ("finite other tensors", "AMP108", "other"),
)


def checks_of(summary: CheckpointSummary, findings: Sequence[Finding]) -> tuple[Check, ...]:
    """The checks of a scan, in a fixed order.

    Args:
        summary: The checkpoint.
        findings: What `diagnose` found in it.
    """
    return tuple(_checks(summary, findings))


def _checks(summary: CheckpointSummary, findings: Sequence[Finding]) -> Iterator[Check]:
    found = {finding.code for finding in findings}
    roles = {role.role: role for role in summary.roles}
    for name, code, role in _FINITE:
        present = roles.get(role)
        yield Check(
            name=name,
            result=_result(found, [code]) if present else "not in the file",
            headroom={"tensors": present.tensors, "elements": present.elements} if present else {},
        )
    yield Check(name="possible values", result=_result(found, ["AMP106"]))
    yield Check(name="values at the format's maximum", result=_result(found, ["AMP107"]))
    castable = [t for t in summary.tensors if t.role in {"weight", "buffer", "ema"} and not is_mask(t)]
    yield Check(
        name="fp16 range",
        result=_result(found, ["AMP104"]) if castable else "not in the file",
        headroom=_binades(castable),
    )
    for name in ("fp16", "bf16"):
        weights = roles.get("weight")
        lossy = any(name in finding.evidence for finding in findings if finding.code == "AMP105")
        yield Check(
            name=f"{name} cast of the weights",
            result="not in the file" if weights is None else "found" if lossy else "ok",
            headroom=_cast(weights, name),
        )
    masks = [t for t in summary.tensors if is_mask(t)]
    if masks:
        yield Check(
            name="masks", result=f"{len(masks)} tensors of zeros and one large value or -Inf were taken for masks"
        )
    yield _scaler(summary, found)


def _scaler(summary: CheckpointSummary, found: set[str]) -> Check:
    if not summary.scalers:
        return Check(name="loss scaler", result="not in the file")
    scale = summary.scalers[0].scale
    alive = math.isfinite(scale) and scale > DEAD_SCALE
    return Check(
        name="loss scaler",
        result=_result(found, ["AMP401", "AMP402", "AMP403", "AMP404"]),
        headroom={"binades_above_dead": math.log2(scale) - math.log2(DEAD_SCALE)} if alive else {},
    )


def _binades(tensors: Sequence[TensorSummary]) -> dict[str, float]:
    amax = max((t.amax for t in tensors if t.amax is not None), default=None)
    return {"binades": math.log2(FP16_MAX) - math.log2(amax)} if amax is not None else {}


def _cast(role: RoleSummary | None, name: str) -> dict[str, float]:
    loss = next((c for c in role.casts if c.format == name), None) if role else None
    if loss is None:
        return {}
    return {
        "flushed": loss.flushed,
        "subnormal": loss.subnormal,
        "overflowed": loss.overflowed,
        "relative_error": loss.relative_error,
    }


def _result(found: set[str], codes: Sequence[str]) -> str:
    return "found" if found.intersection(codes) else "ok"
