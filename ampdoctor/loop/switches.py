"""Keeps switches of torch off in a replay: each would hide a step's ops, or end the step before anyone can look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_anomaly_mode() -> Iterator[None]:
    """Keep anomaly mode off inside, even if the user's code turns it on; afterwards it is as it was before.

    Only `torch.set_anomaly_enabled` is replaced: `detect_anomaly` and `set_detect_anomaly` both call it.
    """
    enabled, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    switch = torch.set_anomaly_enabled
    switch(False, checks_nan)

    def ignored(*_args: Any, **_kwargs: Any) -> None:
        """Ignore the user's own anomaly mode."""

    torch.set_anomaly_enabled = ignored
    try:
        yield
    finally:
        torch.set_anomaly_enabled = switch
        switch(enabled, checks_nan)


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Run attention layers unfused, as written. A trace switches torch's fusion off anyway, and that changes bits."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
