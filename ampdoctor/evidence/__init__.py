"""Plain frozen data that all packages use: addresses, traces, ranges, checkpoint summaries, findings, reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

show_in_notebook: Callable[[Any], str] | None = None
"""Returns a report as a fragment of HTML. The package's `__init__` sets it, as this package imports no higher one."""
