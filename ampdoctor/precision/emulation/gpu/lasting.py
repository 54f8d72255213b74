"""What code that believes in a GPU leaves in the process, from one piece of it to the next and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampdoctor.precision.emulation.gpu.libraries import what_is_shared
from ampdoctor.precision.emulation.gpu.processes import leave_group


class _Needed:
    """How many need it."""

    times: int = 0


@contextmanager
def lasting_emulation() -> Iterator[None]:
    """Keep the process group that code joins inside, and what Accelerate has made of the device, and no longer."""
    put_back = what_is_shared() if not _Needed.times else None
    _Needed.times += 1
    try:
        yield
    finally:
        _Needed.times -= 1
        if put_back is not None:
            leave_group()
            put_back()
