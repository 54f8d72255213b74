"""tracetorch: `with TraceSession(model)` around the step, then `session.anomalies`.

Read as an answer: the first anomaly of severity critical (NaN and Inf in an output, NaN in a gradient); with warnings
it finds something in every run.
"""

from __future__ import annotations

import importlib

from benchmarks.peers.answer import Answer, Case


def trace_session(case: Case) -> Answer | None:
    """Train, each step in a session of its own."""
    session_of = importlib.import_module("tracetorch").TraceSession
    loop = case.loop()
    for step, batch in loop.batches():
        with session_of(loop.model) as session:
            loop.step(batch)
        for anomaly in session.anomalies:
            if anomaly.severity == "critical":
                return Answer(step=step, module=anomaly.layer, said=f"{anomaly.layer}: {anomaly.message}")
    return None
