"""Brings a run to where its checkpoint stood beside the weights: place in the data, random numbers, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ampdoctor.errors import UsageError
from ampdoctor.replay.batches import DataPlace, loads_state
from ampdoctor.replay.load_checkpoint import load_schedulers, not_restored, set_generators
from ampdoctor.replay.training_run import takes_start

if TYPE_CHECKING:
    from ampdoctor.checkpoints.standing import Standing
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.opening.request import ReplayRequest


def begin_anew(session: Session, request: ReplayRequest, say: Callable[[str], None]) -> None:
    """Let the batches of a run without a checkpoint begin where the request says.

    Args:
        session: The run, before its first batch is drawn.
        request: How many batches to pass over, and whether epoch follows epoch.
        say: Told how the place was come to.
    """
    session.tape.place = DataPlace(batches=_passed_over(request, session, 0), epochs=request.until_sick, say=say)


def go_on(
    session: Session, request: ReplayRequest, step: int | None, standing: Standing, say: Callable[[str], None]
) -> Iterator[str]:
    """Let the run go on where its checkpoint was saved, as far as the request asks for it.

    Args:
        session: The run with the checkpoint loaded, before its first batch is drawn.
        request: How the place in the data is to be found.
        step: The optimizer steps that the checkpoint holds; None if it does not say.
        standing: What else it holds of where the training stood.
        say: Told how the place was come to.

    Yields:
        What is another than it was in the training, a clause each.
    """
    run = session.run
    unloaded = None if run.load is not None else load_schedulers(session.schedulers, standing.schedulers)
    asked = request.until_sick or request.skip_batches is not None
    if not (asked or takes_start(run.batches)):
        session.tape.place = DataPlace(say=say)
        return
    if unloaded is not None:
        yield f"the file {unloaded}"
    yield from not_restored(standing.random, session.device.type)
    if run.counters is not None:
        put = run.counters(standing.numbers)
        said = ", ".join(f"{name} = {value:g}" for name, value in put.items())
        rest = "what else the script counts begins as in a fresh run (where it can resume by itself: -- --resume ...)"
        yield f"{'of the script ' + said + ' are set; ' if put else ''}{rest}"
    if step is None and not isinstance(request.skip_batches, int):
        yield "the file says no step: the batches begin with the factory's first (--skip-batches N passes over some)"
    state = None
    if asked and not isinstance(request.skip_batches, int) and loads_state(run.batches):
        state = standing.loaders[0] if len(standing.loaders) == 1 else None
    session.tape.place = DataPlace(
        steps=step or 0,
        batches=_passed_over(request, session, step or 0),
        state=state,
        epochs=request.until_sick,
        arrive=partial(set_generators, standing.random),
        say=say,
    )


def _passed_over(request: ReplayRequest, session: Session, step: int) -> int:
    """Returns the micro-batches that lie behind the run."""
    wanted = request.skip_batches
    if isinstance(wanted, int):
        if wanted and takes_start(session.run.batches):
            raise UsageError("--skip-batches: TrainingRun(batches=...) takes `start`, and finds its place by itself")
        return wanted
    return step * session.run.accumulation_steps if wanted == "checkpoint" or request.until_sick else 0
