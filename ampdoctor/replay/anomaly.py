"""torch's anomaly mode, kept off in a replay: it raises at the first NaN of a backward, before anyone can trace it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
