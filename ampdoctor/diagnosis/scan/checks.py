"""The checks of a scan: what was examined in a checkpoint, and how far it is from a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ampdoctor.diagnosis.catalogue import codes_in
from ampdoctor.diagnosis.scan.scaler import shown_scaler
from ampdoctor.diagnosis.scan.tensors import FP16_MAX, is_mask, losses
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, CheckpointSummary, RoleSummary, TensorRole
from ampdoctor.evidence.report import Check, Finding

_FINITE: tuple[tuple[str, tuple[str, ...], TensorRole], ...] = (
    ("finite weights", ("AMP101",), "weight"),
    ("finite buffers", ("AMP102",), "buffer"),
    ("finite averaged weights", ("AMP101", "AMP114"), "ema"),
    ("finite optimizer state", ("AMP103",), "moment"),
    ("finite other tensors", ("AMP108",), "other"),
)
_CASTABLE: tuple[tuple[str, TensorRole], ...] = (("weights", "weight"), ("averaged weights", "ema"))
_OPTIONAL = frozenset({"ema"})  # roles that most checkpoints lack: no check without such a tensor


def checks_of(summary: CheckpointSummary, findings: Sequence[Finding]) -> tuple[Check, ...]:
    """Returns the checks of a scan, in a fixed order."""
    return (*_of_tensors(summary, findings), _scaler(summary, findings))


def _of_tensors(summary: CheckpointSummary, findings: Sequence[Finding]) -> Iterator[Check]:
    found = {finding.code for finding in findings}
    roles = {role.role: role for role in summary.roles}
    for name, codes, role in _FINITE:
        present = roles.get(role)
        if present is None and role in _OPTIONAL:
            continue
        yield Check(
            name=name,
            result=_result({f.code for f in findings for code in codes if _speaks_of(f, code, role)}, codes)
            if present
            else "not in the file",
            headroom={"tensors": present.tensors, "elements": present.elements} if present else {},
        )
    yield Check(name="possible values", result=_result(found, ["AMP106", "AMP110", "AMP111", "AMP112"]))
    yield Check(name="values at the format's maximum", result=_result(found, ["AMP107"]))
    castable = [t for t in summary.tensors if t.role in {"weight", "buffer", "ema"} and not is_mask(t)]
    amax = max((t.amax for t in castable if t.amax is not None), default=None)
    yield Check(
        name="fp16 range",
        result=_result(found, ["AMP104"]) if castable else "not in the file",
        headroom={} if amax is None else {"log2": math.log2(FP16_MAX) - math.log2(amax)},
    )
    for words, role in _CASTABLE:
        present = roles.get(role)
        if present is None and role in _OPTIONAL:
            continue
        for name in ("fp16", "bf16"):
            lossy = any(_speaks_of(finding, "AMP105", role) and name in finding.evidence for finding in findings)
            yield Check(
                name=f"{name} cast of the {words}",
                result="not in the file" if present is None else "found" if lossy else "ok",
                headroom=_cast(present, name),
            )
    masks = [t for t in summary.tensors if is_mask(t)]
    if masks:
        yield Check(
            name="masks", result=f"{len(masks)} tensors of zeros and one large value or -Inf were taken for masks"
        )
    if summary.optimizers:
        yield Check(name="optimizer settings and moments", result=_result(found, codes_in("scan.optimizer")))


def _speaks_of(finding: Finding, code: str, role: TensorRole) -> bool:
    return finding.code == code and finding.evidence.get("role", role) == role


def _scaler(summary: CheckpointSummary, findings: Sequence[Finding]) -> Check:
    found = {finding.code for finding in findings}
    scaler = shown_scaler(summary, findings)
    if scaler is None:
        return Check(name="loss scaler", result="found" if "AMP410" in found else "not in the file")
    above = math.log2(scaler.scale) - math.log2(DEAD_SCALE) if scaler.scale > 0 and not scaler.dead else None
    return Check(
        name="loss scaler",
        result=_result(found, codes_in("scan.scaler")),
        headroom={"log2_above_dead": above} if above is not None else {},
    )


def _cast(role: RoleSummary | None, name: str) -> dict[str, float]:
    loss = next((c for c in role.casts if c.format == name), None) if role else None
    return {} if loss is None else losses(loss)


def _result(found: set[str], codes: Iterable[str]) -> str:
    return "found" if found.intersection(codes) else "ok"
