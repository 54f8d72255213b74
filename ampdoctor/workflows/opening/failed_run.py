"""What is known of the run that failed, and how its replay here compares with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.not_reproduced import Here, KnownFailure, known_failure

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.opening.open_replay import OpenReplay


def failed_run(replay: OpenReplay) -> KnownFailure | None:
    """Returns the failure that the user, the checkpoint or its log knows of; None where nothing does.

    Args:
        replay: The open replay.
    """
    request, resumed = replay.request, replay.resumed
    scaler = resumed.file_scaler if resumed is not None else None
    return known_failure(replay.log, scaler, said=request.expect_failure, thresholds=request.thresholds)


def replayed_here(replay: OpenReplay, session: Session, steps: int) -> Here:
    """Returns how the run was replayed, beside what is known of the failed run.

    Args:
        replay: The open replay.
        session: The session.
        steps: Number of steps that were replayed.
    """
    request, resumed = replay.request, replay.resumed
    wanted = request.compare_steps
    if request.until_sick and wanted:  # of so many steps it never compares more than the last
        wanted = None
    run = replay.described(session, steps)
    return Here(
        steps=steps,
        device=run["device"],
        policy=run["policy"],
        precision=run["precision"],
        scaled=session.events.enabled,
        torch=run["torch"],
        checkpoint=resumed is not None,
        global_step=replay.global_step,
        lacks=resumed.lacks if resumed is not None else (),
        file_scaler=resumed.file_scaler if resumed is not None else None,
        compared=wanted if wanted is not None and wanted < steps else None,
        option="--max-steps" if request.until_sick else "--steps",
        placed=session.tape.is_placed,
    )
