"""Proof: the same step again, from the same state and random state, with a change in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import AmpdoctorError, ReplayError, UserCodeError
from ampdoctor.evidence.report import Prescription, PrescriptionKind, PrescriptionStatus
from ampdoctor.precision import force_fp32
from ampdoctor.probes.gradients import GradientProbe, relative_error
from ampdoctor.probes.nonfinite import NonFiniteProbe

if TYPE_CHECKING:
    from ampdoctor.probes.gradients import Gradients
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot

AFTER = 3
"""Steps after the bad one that must be clean as well (DESIGN: verified)."""
AGREEMENT = 0.1
"""Largest relative L2 error of the gradients against fp32 that counts as agreement.

Measured on small transformers: scaled fp16 5e-4 to 7e-3, bf16 3e-3 to 5.5e-3; runs above 0.1 failed to learn. bf16 on
deep or recurrent nets can reach a few percent without harm: the bound is where harm was seen, not where rounding ends.
"""

UNPROVABLE = "the failure does not come back from a snapshot, so a clean replay would prove nothing"

Change = Callable[["Session"], AbstractContextManager[Any]]


class Trials:
    """Tries changes on one bad step.

    Args:
        session: The session, in any state.
        snapshot: The state at the start of the bad step.
        step: The bad step.
        steps: Number of steps of the whole replay.
        comes_back: Without a change the failure comes back from the snapshot; otherwise nothing can be verified.
        raised: What the user's code ended the bad step with, type first; None where it came to its end.
    """

    def __init__(
        self,
        session: Session,
        snapshot: Snapshot,
        step: int,
        steps: int,
        *,
        comes_back: bool = True,
        raised: str | None = None,
    ) -> None:
        self._session = session
        self._snapshot = snapshot
        self._step = step
        self._steps = steps
        self._comes_back = comes_back
        self._raised = raised
        self._reference: Gradients | None = None
        self._referenced = False

    def attempt(
        self, kind: PrescriptionKind, value: Any, change: Change, detail: str, *, from_step: int | None = None
    ) -> Prescription:
        """Replay with a change and say whether it cures.

        Args:
            kind: What is changed.
            value: The change, machine-readable.
            change: The change as a context around the steps.
            detail: The change in a sentence.
            from_step: First step that is replayed; the one after the bad one for a skipped batch.

        Returns:
            The prescription with status `verified`, `failed` or `worse`; `not_run` where nothing can be proved.
        """
        if not self._comes_back:
            return Prescription(kind=kind, value=value, status="not_run", reason=UNPROVABLE, detail=detail)
        first = self._step if from_step is None else from_step
        status, reason = self._replay(change, first)
        return Prescription(kind=kind, value=value, status=status, reason=reason, detail=detail)

    def reference(self) -> Gradients | None:
        """The bad step's gradients in fp32 from the same state; None where fp32 is not finite either."""
        if not self._referenced:
            self._referenced = True
            sentinel, gradients = NonFiniteProbe(), GradientProbe()
            self._snapshot.restore()
            try:
                with self._session.reference(), self._session.watched(sentinel, gradients):
                    outcome = self._session.step(self._step)
                fine = not sentinel.sightings.sinks and (outcome.loss is None or math.isfinite(outcome.loss))
                self._reference = dict(gradients.gradients) if fine else None
            except AmpdoctorError:
                self._reference = None  # a model with half written into its code cannot run in fp32
            finally:
                self._snapshot.restore()
        return self._reference

    def _replay(self, change: Change, first: int) -> tuple[PrescriptionStatus, str | None]:
        session = self._session
        reference = self.reference() if first == self._step else None
        last = min(first + AFTER, self._steps - 1)
        if first > last:
            return "not_run", "no step is left after the one left out"
        sentinel, gradients = NonFiniteProbe(), GradientProbe()
        self._snapshot.restore()
        try:
            with change(session), session.watched(sentinel, gradients):
                for step in range(first, last + 1):
                    outcome = session.step(step)
                    if sentinel.sightings.sinks:
                        return "failed", f"step {step} is still non-finite ({sentinel.sightings.sinks[0]})"
                    if outcome.skipped:
                        return "failed", f"the scaler still skips step {step}"
                    if step == self._step and reference is not None:
                        error = relative_error(gradients.gradients, reference)
                        if not error <= AGREEMENT:
                            return "failed", f"finite, but the gradients are {error:.2g} away from fp32's (relative L2)"
        except AmpdoctorError as error:
            return self._ended_by(error)
        finally:
            self._snapshot.restore()
        if first == self._step and reference is None:
            return "failed", "finite, but fp32 is not finite here, so there is nothing to agree with"
        return "verified", None

    def _ended_by(self, error: AmpdoctorError) -> tuple[PrescriptionStatus, str]:
        """The step raised with the change: is it what ended it without the change, too?"""
        if self._raised is not None and isinstance(error, UserCodeError) and _kind(error.raised) == _kind(self._raised):
            return "failed", f"the user's code still raises {error.raised}"
        return "not_run", f"the replay with the change cannot run: {error}"


def _kind(raised: str | None) -> str:
    """The type of an exception that is described in a line."""
    return (raised or "").partition(":")[0]


def fp32_modules(names: Sequence[str]) -> Change:
    """The named modules in fp32."""

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        real = {clean: name for name, clean in session.module_names.items()}
        modules = dict(session.model.named_modules())
        for name in names:
            if isinstance(modules.get(real.get(name, name)), torch.jit.ScriptModule):
                raise ReplayError(f"{name} is a scripted module, whose precision cannot be changed from outside")
        with force_fp32(session.model, [real.get(name, name) for name in names], session.optimizers.values()):
            yield

    return change


def compute_dtype(compute: str) -> Change:
    """The whole run in another compute format."""

    def change(session: Session) -> AbstractContextManager[Any]:
        return session.computing_in(compute)

    return change


def loss_scale(scale: float) -> Change:
    """Another loss scale at the bad step."""

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        state = session.scaler.state_dict()
        if state:
            session.scaler.load_state_dict({**state, "scale": scale})
        yield

    return change


def with_scaler(scale: float) -> Change:
    """A fresh, enabled GradScaler of that scale in place of the run's own."""

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        with session.scaling_with(torch.amp.GradScaler(session.device.type, init_scale=scale)):
            yield

    return change


def optimizer_argument(name: str, value: float) -> Change:
    """One hyper-parameter of every optimizer."""

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        for optimizer in session.optimizers.values():
            for group in optimizer.param_groups:
                if name in group:
                    group[name] = value
        yield

    return change


@contextmanager
def no_change(session: Session) -> Iterator[None]:  # noqa: ARG001 - a change that changes nothing
    """For a trial that leaves something out."""
    yield


def first_cure(attempts: Iterator[Prescription]) -> Prescription | None:
    """Try in order until one is verified; the ones before it become its alternatives."""
    tried: list[Prescription] = []
    for attempt in attempts:
        if attempt.verified:
            return replace(attempt, alternatives=tuple(tried))
        tried.append(attempt)
    return replace(tried[0], alternatives=tuple(tried[1:])) if tried else None
