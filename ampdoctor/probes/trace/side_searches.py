"""What a trace looks for beside the births: each of these may fail without taking the diagnosis with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.of_runs.trace import LeftOut
from ampdoctor.hooks.interfaces import describe, is_out_of_memory


class SideSearches:
    """Runs the parts of a trace whose results are notes, and keeps what failed.

    Where a value was born is read from the op's inputs and results alone. All else (its float64 twin, what made its
    operand, the way it takes) is a note to that, and a failure in here costs the note.
    """

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], LeftOut] = {}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What failed, each with the op at which it did so first."""
        return tuple(self._failed.values())

    @contextmanager
    def costing(self, note: str, kernel: str) -> Iterator[None]:
        """What fails in here is kept as a note that is missing.

        Args:
            note: What is not known then.
            kernel: The op at which it is looked for, without namespace.

        Raises:
            Exception: The memory does not suffice; for that there is another way than a note.
        """
        with own_work(lambda error: self._keep(note, kernel, error)):
            yield

    def _keep(self, note: str, kernel: str, error: Exception) -> None:
        self._failed.setdefault((note, kernel), LeftOut(what=note, op=f"aten.{kernel}", reason=describe(error)))


@contextmanager
def own_work(failed: Callable[[Exception], None]) -> Iterator[None]:
    """What fails in here is ampdoctor's, and is given to `failed`; its own errors and missing memory go on.

    Args:
        failed: Takes what was raised, and may raise something itself.
    """
    try:
        yield
    except AmpdoctorError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        failed(error)
