"""What `recommend` says of a run, as a user would put it to use."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.requests import ReplayRequest

RECORDED = 50
"""Steps that are replayed for the advice: the command's own default."""
PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The changes that are to be made.

    Attributes:
        scaler: Arguments of the GradScaler; None where the run's own is to stay.
        fp32_modules: Modules to keep in fp32.
        precision: Another precision for the whole run; None for its own.
        section: The report's section on loss scaling.
        findings: What was found, a sentence each.
        seconds: Of processor time.
        failure: Why there is no advice, in a sentence.
    """

    scaler: Mapping[str, float] | None = None
    fp32_modules: Sequence[str] = ()
    precision: str | None = None
    section: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[str] = ()
    seconds: float = 0.0
    failure: str | None = None

    @property
    def changes(self) -> bool:
        """Is anything to be changed?"""
        return self.scaler is not None or bool(self.fp32_modules) or self.precision is not None

    def sentence(self) -> str:
        """For a cell of the table."""
        if self.failure is not None:
            return f"none: {self.failure}"
        said = [] if self.precision is None else [self.precision]
        if self.scaler is not None:
            said.append(", ".join(f"{key} {value:g}" for key, value in self.scaler.items() if value != TORCH.get(key)))
        if self.fp32_modules:
            said.append(f"fp32: {', '.join(self.fp32_modules)}")
        return "; ".join(said) or "keep"

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


TORCH = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def ask(factory: str, arguments: Mapping[str, Any]) -> Advice:
    """Run the command on the first steps of a run."""
    began = time.process_time()
    length = arguments["steps"]
    request = ReplayRequest(
        factory=factory,
        arguments=arguments,
        steps=min(RECORDED, length),
        device="cpu",
        thresholds=thresholds_from({"AMP723": {"horizon": length}}),  # a user knows how long the training will be
    )
    try:
        report = recommend(request)
    except AmpdoctorError as error:
        return Advice(failure=str(error), seconds=time.process_time() - began)
    return _of(report, time.process_time() - began)


def _of(report: Report, seconds: float) -> Advice:
    section = {} if report.scaler is None else asdict(report.scaler)
    verified = {
        f.prescription.kind: f.prescription.value for f in report.findings if f.prescription and f.prescription.verified
    }
    dtype = verified.get("dtype")
    return Advice(
        scaler=section["recommended"] if section.get("change") else None,
        fp32_modules=tuple(verified.get("fp32_modules", ())),
        precision=None if dtype is None else PRECISIONS[str(dtype).removeprefix("torch.")],
        section=section,
        findings=tuple(f"{finding.code} {finding.severity}: {finding.message}" for finding in report.findings),
        seconds=seconds,
    )
