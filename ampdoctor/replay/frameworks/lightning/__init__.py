"""Lightning: a module and its Trainer are a run; its own loops take the steps."""

from __future__ import annotations

from typing import Final

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""The names under which Lightning is installed: two copies of the same code."""
