"""stabilityguard: `GuardedOptimizer` around the optimizer, and `MixedPrecisionGuard.check_stability()`.

Read as an answer: `spike_layer` of the first spike report that it writes; a parameter counts as its module.
`overflow_detected` may mean any of our overflows, `underflow_detected` our underflow; they are asked only where the
optimizer has raised an alarm. `GradScaler` does not step an optimizer on non-finite gradients, so the guard would never
see them: here it is stepped in any case.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from benchmarks.peers.answer import Answer, Case

_MEANING = {
    "overflow_detected": ("forward_overflow", "backward_overflow", "grad_overflow"),
    "underflow_detected": ("grad_underflow",),
}


def guarded_optimizer(case: Case) -> Answer | None:
    """Train with the guarded optimizer."""
    loop = case.loop()
    guard = importlib.import_module("stabilityguard").GuardedOptimizer(
        loop.optimizer, loop.model, nan_action="skip", verbose=False, log_dir=str(case.folder)
    )
    precision = importlib.import_module("stabilityguard.precision").MixedPrecisionGuard(loop.model)
    reports: list[dict[str, Any]] = []
    guarded = guard.step

    def step_and_check(*args: Any, **kwargs: Any) -> Any:
        reports.append(precision.check_stability())
        return guarded(*args, **kwargs)

    guard.step = step_and_check
    loop.optimizer = guard
    loop.scaler._maybe_opt_step = lambda optimizer, _state, *args, **kwargs: optimizer.step(*args, **kwargs)  # noqa: SLF001
    for step, batch in loop.batches():
        loop.step(batch)
        for path in sorted(case.folder.rglob("spike_*.json")):
            layer = json.loads(path.read_text(encoding="utf-8"))["snapshot"]["spike_layer"]
            causes = tuple(cause for word, means in _MEANING.items() if reports[-1][word] for cause in means)
            return Answer(step=step, module=_module(layer, loop.model), causes=causes, said=f"spike in {layer}")
    return None


def _module(layer: str, model: Any) -> str:
    if layer == "root":
        return ""
    parameters = dict(model.named_parameters())
    return layer.rpartition(".")[0] if layer in parameters else layer
