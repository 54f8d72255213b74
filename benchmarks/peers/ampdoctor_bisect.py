"""This project: `ampdoctor bisect-nan`, under the CPU's own cast policy, as the peers run.

Read as an answer: the first finding of severity error.
"""

from __future__ import annotations

from benchmarks.peers.answer import Answer, Case


def bisect_nan(case: Case) -> Answer | None:
    """Diagnose the run."""
    from ampdoctor.workflows.bisect_nan import bisect_nan as diagnosed
    from ampdoctor.workflows.requests import ReplayRequest

    report = diagnosed(
        ReplayRequest(
            factory="fixtures/corpus/runs.py:make_run",
            arguments={"case": case.name},
            policy="native",
            checkpoint=None if case.checkpoint is None else str(case.checkpoint),
        )
    )
    for finding in report.findings:
        if finding.severity == "error":
            where = finding.where
            return Answer(
                step=-1 if where.step is None else where.step,
                module=where.module,
                op=where.op,
                causes=(finding.cause,) if finding.cause else (),
                said=finding.message,
            )
    return None
