"""Sickness that stays finite: the same steps in fp32, from the same states, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampdoctor.evidence.report import Check, Finding

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.replaying import OpenReplay


def compare_with_fp32(session: Session, replay: OpenReplay, steps: int) -> tuple[list[Finding], list[Check]]:
    return [], []
