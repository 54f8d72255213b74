"""Options that say something of one run alone, which no file or environment may say for many."""

from __future__ import annotations

ONE_RUN = "of one run"
"""Stands behind the option in `Annotated`."""
