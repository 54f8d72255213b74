"""sherlorch: `with sherlorch.trace() as tracker`, then `tracker.diagnose(loss)` where `tracker.has_issue(loss)`.

Read as an answer: culprit #1. Its module tag begins with the name under which the model is watched; an op without a
tag ran outside of all modules.
"""

from __future__ import annotations

import importlib

from benchmarks.peers.answer import Answer, Case

_WATCHED = "model"


def trace(case: Case) -> Answer | None:
    """Train, each step traced."""
    sherlorch = importlib.import_module("sherlorch")
    loop = case.loop()
    for step, batch in loop.batches():
        with sherlorch.trace() as tracker:
            tracker.watch(loop.model, name=_WATCHED)
            loss = loop.step(batch)
            report = tracker.diagnose(loss) if tracker.has_issue(loss) else None
        if report is not None:
            if not report.culprits:
                return Answer(step=step, said=str(report).strip())
            first = report.culprits[0]
            module = (first.module_path or "").removeprefix(_WATCHED).removeprefix(".")
            return Answer(step=step, module=module, op=first.op_name, said=first.summary())
    return None
