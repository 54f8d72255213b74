"""Weights that are not finite before a step whose predecessor was well: what is known of the update between the two."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.bad_state import seen_beside, state_finding
from ampdoctor.diagnosis.tensors.beyond_fp16 import FP16_OVERFLOW_AT
from ampdoctor.evidence.where import Where
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.probes.ops.exact import is_nonfinite, stats_of

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding, Report
    from ampdoctor.evidence.where import NonFinite
    from ampdoctor.live.loop_watch import Attempt, LoopWatch
    from ampdoctor.live.numbers.other_modules import Beside, Lost

_SHOWN = ("lr", "betas", "momentum", "alpha", "eps", "weight_decay")
"""Settings that a sentence names, of the optimizers that have them."""
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""State of torch's optimizers whose root an update is divided by, with eps added to it."""


@dataclass(frozen=True, slots=True, eq=False)
class LastUpdate:
    """The settings with which an optimizer has made its last update, of gradients that were not seen to be sick.

    Attributes:
        step: Of the update.
        optimizer: Whose.
        settings: Of each of its groups; a scheduler may have changed them since.
        read: Its gradients were read; they were finite.
    """

    step: int
    optimizer: weakref.ref[torch.optim.Optimizer]
    settings: tuple[Mapping[str, Any], ...]
    read: bool

    @classmethod
    def of(cls, attempt: Attempt, *, read: bool) -> LastUpdate:
        """The update that is about to be made, of gradients that were read and are finite, or were not read."""
        groups = attempt.optimizer.param_groups
        settings = tuple({key: group[key] for key in _SHOWN if key in group} for group in groups)
        return cls(attempt.step, weakref.ref(attempt.optimizer), settings, read)

    def explained(self, report: Report, parameters: Mapping[str, torch.Tensor]) -> Report:
        """Returns the report; where a weight is not finite before the step, this update is named.

        Args:
            report: Of a step after it, whose weights are as it has left them.
            parameters: Of the step's model, by name.
        """
        return replace(report, findings=tuple(self._told(finding, parameters) for finding in report.findings))

    def _told(self, finding: Finding, parameters: Mapping[str, torch.Tensor]) -> Finding:
        where, optimizer = finding.where, self.optimizer()
        parameter = parameters.get(where.tensor or "")
        if where.phase != "checkpoint" or parameter is None or optimizer is None:
            return finding
        settings = self._settings_of(parameter, optimizer)
        if settings is None:
            return finding
        state = optimizer.state.get(parameter, {})
        if parameter.grad is None and not state:
            return finding  # it was not updated
        with unseen(), torch.no_grad():
            lost = int(parameter.isfinite().logical_not().sum())
            why = list(_reasons(parameter, settings, state))
        if not lost:
            return finding
        kind = type(optimizer).__name__
        shown = ", ".join([kind, *(f"{key}={_text(value)}" for key, value in settings.items())])
        after = "" if why else ", or what the loop did to the weights after it"
        gradients = "the gradients of that step were finite, and" if self.read else "the gradients were not read;"
        message = (
            f"{where.tensor} holds {lost} non-finite values after step {self.step}: {gradients} its update ({shown}) "
            f"made the weights so{after}{': ' if why else ''}{'; '.join(why)}"
        )
        return replace(
            finding,
            message=message,
            cause=None,
            where=replace(where, step=self.step, phase="optimizer", op=f"{kind}.step"),
            evidence={**finding.evidence, "settings": {key: _text(value) for key, value in settings.items()}},
            help="Mend what the update was made with, and go on from a checkpoint before it.",
        )

    def _settings_of(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        for group, settings in zip(optimizer.param_groups, self.settings, strict=False):
            if any(one is parameter for one in group["params"]):
                return settings
        return None


def lost_weight(parameters: Mapping[str, torch.Tensor], step: int) -> Finding | None:
    """Returns the finding for the first weight that is not finite when a training ends; None where each is.

    Tensors that lie in parts on several processes are not asked: that would need the others.

    Args:
        parameters: Of the loop's models, by name; those that are frozen may hold infinities on purpose.
        step: The last update.
    """
    for name, parameter in parameters.items():
        if not parameter.requires_grad or type(parameter.detach()) is not torch.Tensor or not is_nonfinite(parameter):
            continue
        stats = stats_of(parameter)
        module, _, leaf = name.rpartition(".")
        nonfinite: NonFinite = "nan" if stats.nans else "inf"
        where = Where(
            step=step, phase="checkpoint", module=module, op=f"state:{leaf}", tensor=name, nonfinite=nonfinite
        )
        message = (
            f"{name} holds {stats.nans + stats.infs} non-finite values when the training ends, after step {step}: no "
            "optimizer was seen to make them so, and the loop's own code writes to the weights"
        )
        return replace(state_finding("param", where, stats), message=message, cause=None)
    return None


def lost_beside(lost: Lost, models: Iterable[torch.nn.Module]) -> Finding:
    """Returns the finding for what a loop keeps beside its models and was finite before.

    Args:
        lost: It.
        models: The loop's.
    """
    own = [(name, p) for model in models for name, p in (*model.named_parameters(), *model.named_buffers())]
    with unseen(), torch.no_grad():
        twin = next((pair for pair in own if _same(lost, *pair)), None)
        twin = twin or next((pair for pair in own if _overflowed(lost.tensor, pair[1])), None)
        amax = None if twin is None or is_nonfinite(twin[1]) else stats_of(twin[1]).amax
        stats = stats_of(lost.tensor)
    return seen_beside(
        lost.name, stats, lost.since, lost.step, None if twin is None or amax is None else (twin[0], amax)
    )


def found_beside(beside: Beside, watch: LoopWatch, step: int, *, at_the_end: bool) -> tuple[Finding, int] | None:
    """Look at what a loop keeps beside its models, where it is time; returns what is not finite any more.

    Args:
        beside: Knows what was finite.
        watch: The loop's.
        step: The step that was made last.
        at_the_end: The training has ended: what is on its way is waited for.
    """
    if watch.recorder.is_crowded:  # what is beside one thread's model may be another's
        return None
    models = [root for _, root in watch.recorder.models.roots]
    if not at_the_end and beside.wants(step):
        with watch.looking_away():
            beside.look(step, models)
    lost = beside.finish(step, models) if at_the_end else beside.arrived(models)
    return None if lost is None else (lost_beside(lost, models), lost.step)


def _same(lost: Lost, name: str, tensor: torch.Tensor) -> bool:
    return tensor.shape == lost.tensor.shape and f".{lost.name}".endswith(f".{name}")


def _overflowed(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Is a copy infinite just where a tensor is beyond fp16? A list of copies has none of the model's names."""
    if copy.shape != tensor.shape or copy.device != tensor.device or type(tensor.detach()) is not torch.Tensor:
        return False
    beyond = tensor.detach().abs() >= FP16_OVERFLOW_AT
    return bool(beyond.any()) and bool((copy.detach().isinf() == beyond).all())


def _reasons(parameter: torch.Tensor, settings: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """Yields what of an optimizer's settings and state makes an update of finite gradients non-finite."""
    for key, value in settings.items():
        if isinstance(value, torch.Tensor | float) and not math.isfinite(value):
            yield f"{key} is {_text(value)}"
    lost = parameter.isfinite().logical_not()
    for key, held in state.items():
        if not isinstance(held, torch.Tensor) or held.shape != parameter.shape or not held.is_floating_point():
            continue
        dtype = str(held.dtype).removeprefix("torch.")
        if count := int(held.isfinite().logical_not().sum()):
            yield f"its {key}, in {dtype}, holds {count} non-finite values"
        eps = settings.get("eps")
        if key in _SQUARES and isinstance(eps, float) and float(torch.tensor(eps, dtype=held.dtype)) == 0.0:
            zeros = int(((held == 0) & lost).sum())
            small = "eps is 0" if eps == 0.0 else f"eps={eps:g} is 0 in {dtype}"
            if zeros:
                yield f"its {key} is 0 in {zeros} places where the weights are lost, and {small}"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return (
        f"{float(value):g}" if isinstance(value, torch.Tensor | float) and not isinstance(value, bool) else str(value)
    )
