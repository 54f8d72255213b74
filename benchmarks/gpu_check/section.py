"""What one part of the check hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The answers of one part.

    Attributes:
        rows: What the device answered, by what was asked; JSON values, kept in the golden file.
        differences: One sentence for each answer that is not the CPU's.
        skipped: One sentence for each question that was not asked, with its reason.
    """

    rows: Mapping[str, Any]
    differences: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
