"""Switches of torch's own that a replay keeps off: each would hide a step's ops, or end it before anyone can look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampdoctor.loop.torch_internals import no_modes


@contextmanager
def no_anomaly_mode() -> Iterator[None]:
    """Anomaly mode is off inside, also where the user's code turns it on, and afterwards as it was before.

    `detect_anomaly` and `set_detect_anomaly` both go through `torch.set_anomaly_enabled`, so that is what is replaced.
    """
    enabled, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    switch = torch.set_anomaly_enabled
    switch(False, checks_nan)

    def ignored(*_args: Any, **_kwargs: Any) -> None:
        """The user's own anomaly mode, which a replay does without."""

    torch.set_anomaly_enabled = ignored
    try:
        yield
    finally:
        torch.set_anomaly_enabled = switch
        switch(enabled, checks_nan)


@contextmanager
def no_fast_path() -> Iterator[None]:
    """An attention layer that torch would fuse runs as written: a trace switches the fusion off, which moves bits."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def unseen() -> Iterator[None]:
    """Looks at tensors that neither a mode nor autograd takes part in."""
    with torch._C.DisableTorchFunction(), no_modes(), torch.no_grad():  # noqa: SLF001 - no public name
        yield
