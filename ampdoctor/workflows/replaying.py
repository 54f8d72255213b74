"""Opening a replay: the factory loaded, the device chosen, CUDA's casts in place, a checkpoint put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints import load_state
from ampdoctor.precision.policy import autocast_policy
from ampdoctor.replay.factory import LoadedFactory, load_factory
from ampdoctor.replay.resume import ResumeReport, resume
from ampdoctor.replay.session import Session, choose_device

if TYPE_CHECKING:
    from ampdoctor.workflows.request import ReplayRequest


@dataclass(slots=True)
class OpenReplay:
    """A replay that is ready: makes fresh sessions, and remembers what a report must say of them.

    Attributes:
        request: What was asked.
        device: Where it runs.
        resumed: What loading the checkpoint found; None without one.
        notes: What is different here from the machine where the run failed, in sentences.
    """

    request: ReplayRequest
    device: torch.device
    factory: LoadedFactory
    resumed: ResumeReport | None = None
    notes: list[str] = field(default_factory=list)

    def session(self) -> Session:
        """A fresh run from the factory, with the checkpoint loaded.

        Raises:
            FactoryError: The factory gives no usable run.
            CheckpointError: The checkpoint cannot be read or does not fit.
        """
        request = self.request
        run = self.factory.make(request.arguments, batches=request.batches, loss=request.loss)
        session = Session(
            run, device=self.device, precision=request.precision, user_code=self.factory.user_code
        )
        if request.checkpoint is not None:
            state = load_state(request.checkpoint)
            self.resumed = resume(
                run, session.optimizers, session.scaler, state, allow_partial=request.allow_partial
            )
        return session

    def described(self, session: Session, steps: int) -> Mapping[str, Any]:
        """The report's `run` section."""
        return {
            "device": str(self.device),
            "policy": self.request.policy if self.device.type == "cpu" else "native",
            "precision": session.precision.compute,
            "autocast": session.precision.autocast,
            "steps": steps,
            "replays": session.replays,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "notes": list(dict.fromkeys(self.notes)),
        }


@contextmanager
def open_replay(request: ReplayRequest) -> Iterator[OpenReplay]:
    """Everything a replay needs around it; the process is as it was afterwards.

    Args:
        request: What to replay, and how.

    Raises:
        AmpdoctorError: The device, the factory or the checkpoint cannot be used; each with its sentence.
    """
    device = choose_device(request.device)
    emulated = device.type == "cpu" and not torch.cuda.is_available()
    environment: Callable[[], Any] = nullcontext
    with ExitStack() as stack:
        factory = load_factory(request.factory, request.app_dir, environment=environment)
        policy = stack.enter_context(autocast_policy(request.policy)) if device.type == "cpu" else None
        replay = OpenReplay(request, device, factory)
        yield replay
        if policy is not None:
            replay.notes.extend(policy.notes)
