"""Training one run in one way, by the replay engine, with some of its steps beside fp32 from the same state."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

import ampdoctor
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.run_facts import Place
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.probes.modules import GradientHooks, LowPrecisionTensors
from ampdoctor.probes.ranges import ReferenceGradients, ZeroedProbe
from ampdoctor.replay.session import Session
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest

COMPARED = 4
"""Steps of a training that are held beside fp32: at the end of each quarter."""
KINDS = ("activation_grad", "weight_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """One step at one loss scale, beside the same step in fp32 from the same state.

    Attributes:
        step: Which.
        scale: The loss scale.
        skipped: The scaler skipped it: nothing else is known of it then.
        flushed: By kind: share of the half elements that are nonzero in fp32 and zero here; None where there is none.
        predicted: The same from the histogram of the fp32 gradients alone.
        error: Relative L2 error of all weight gradients; None where nothing was there to compare.
    """

    step: int
    scale: float
    skipped: bool
    flushed: Mapping[str, float | None] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How a training went.

    Attributes:
        losses: One a step; None where the loop returned none.
        skipped: Steps that the scaler skipped.
        scale: The loss scale at the end; None without a scaler.
        compared: The compared steps as they were taken.
        unscaled: The same steps at a loss scale of 1.
        seconds: Of processor time, comparisons included.
        failure: Why the training ended early, in a sentence.
    """

    losses: Sequence[float | None]
    skipped: Sequence[int]
    scale: float | None
    compared: Sequence[Shadow] = ()
    unscaled: Sequence[Shadow] = ()
    seconds: float = 0.0
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        shadows = {key: [Shadow(**shadow) for shadow in data[key]] for key in ("compared", "unscaled")}
        return cls(**{**data, **shadows})


def train(factory: str, arguments: Mapping[str, Any], *, fp32_modules: Sequence[str] = (), compare: bool) -> Trained:
    """Train as long as there are batches.

    Args:
        factory: Of the run.
        arguments: The factory's.
        fp32_modules: Put into fp32 with `ampdoctor.apply`, as a user would.
        compare: Hold steps beside fp32; off for a run that is fp32 itself.
    """
    began = time.process_time()
    with (
        open_replay(ReplayRequest(factory=factory, arguments=arguments, device="cpu")) as replay,
        ExitStack() as undone,
    ):
        run = replay.factory.make(arguments)
        if fp32_modules:
            undone.enter_context(ampdoctor.apply(run.model, {"kind": "fp32_modules", "value": list(fp32_modules)}))
        session = Session(run, device=replay.device, user_code=replay.factory.user_code)
        undone.callback(session.close)
        training = _Training(session, _quarters(arguments["steps"]) if compare else frozenset())
        failure = None
        try:
            training.run()
        except AmpdoctorError as error:
            failure = str(error)
        return Trained(
            losses=training.losses,
            skipped=training.skipped,
            scale=session.events.scale(),
            compared=training.compared,
            unscaled=training.unscaled,
            seconds=time.process_time() - began,
            failure=failure,
        )


def _quarters(steps: int) -> frozenset[int]:
    return frozenset(steps * quarter // COMPARED - 1 for quarter in range(1, COMPARED + 1))


class _Training:
    def __init__(self, session: Session, compare: frozenset[int]) -> None:
        self._session = session
        self._compare = compare
        self._plan = _half_plan(session) if compare else None
        self.losses: list[float | None] = []
        self.skipped: list[int] = []
        self.compared: list[Shadow] = []
        self.unscaled: list[Shadow] = []

    def run(self) -> None:
        """Step by step, to the last batch."""
        step = 0
        while self._session.has_step(step):
            if step in self._compare:
                loss, skipped = self._beside_fp32(step)
            else:
                outcome = self._session.step(step)
                loss, skipped = outcome.loss, outcome.skipped
            self.losses.append(loss)
            if skipped:
                self.skipped.append(step)
            step += 1

    def _beside_fp32(self, step: int) -> tuple[float | None, bool]:
        session = self._session
        reference, ranges = ReferenceGradients(self._plan), _Ranges(self._plan)
        here = session.snapshot()
        with session.reference(), session.watched(reference, ranges):
            session.step(step)
        here.restore()
        with session.scaling_with(torch.amp.GradScaler(session.device.type, init_scale=1.0)):
            shadow, _ = _shadow(session, step, reference, ranges)
            self.unscaled.append(shadow)
        here.restore()
        shadow, loss = _shadow(session, step, reference, ranges)
        self.compared.append(shadow)
        return loss, shadow.skipped


def _shadow(session: Session, step: int, reference: ReferenceGradients, ranges: _Ranges) -> tuple[Shadow, float | None]:
    probe = ZeroedProbe(reference)
    scale = session.events.scale() or 1.0
    with session.watched(probe):
        outcome = session.step(step)
    zeroed = probe.zeroed
    if outcome.skipped:
        return Shadow(step=step, scale=scale, skipped=True), outcome.loss
    flushed, nonzero = _by_kind(zeroed.flushed), _by_kind(zeroed.nonzero)
    shadow = Shadow(
        step=step,
        scale=scale,
        skipped=False,
        flushed={kind: flushed[kind] / nonzero[kind] if nonzero[kind] else None for kind in KINDS},
        predicted={kind: ranges.of(kind).flushed("fp16", scale) for kind in KINDS},
        error=zeroed.relative_error,
    )
    return shadow, outcome.loss


def _by_kind(counts: Mapping[Place, int]) -> Mapping[str, int]:
    return {kind: sum(count for place, count in counts.items() if place.kind == kind) for kind in KINDS}


def _half_plan(session: Session) -> LowPrecisionTensors:
    """Which tensors are half, seen in the first step."""
    start, probe = session.snapshot(), FormatsProbe()
    session.has_step(0)
    with session.watched(probe):
        session.step(0)
    start.restore()
    return probe.plan


class _Ranges:
    """Histograms of a step's gradients, of those that the half-precision run has in half."""

    def __init__(self, plan: LowPrecisionTensors | None) -> None:
        self._plan = plan
        self._seen: dict[str, list[Histogram]] = {}
        self._hooks = GradientHooks(self._on_gradient, inputs=plan.inputs if plan is not None else frozenset())

    def of(self, kind: str) -> Histogram:
        """All of a kind."""
        return functools.reduce(Histogram.__add__, self._seen.get(kind, ()), Histogram.empty())

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        """Hooks are in place inside."""
        with self._hooks.attach(session):
            yield

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step."""
        self._seen.clear()
        self._hooks.clear()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """Nothing is read here."""

    def _on_gradient(self, place: Place, _ordinal: int, gradient: Tensor) -> None:
        if self._plan is None or self._plan.holds(place):
            self._seen.setdefault(place.kind, []).append(count(gradient))
