"""One number of a rule that a user may move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ampdoctor.evidence.codec import Finite, Text, form


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One number by which a rule judges, and why it is what it is.

    What is mathematics (a format's largest number, whether a value is finite) is no threshold: nobody can move it.

    Attributes:
        code: The rule's code ("AMP107").
        name: Its name within the rule, as a key of the configuration ("saturated").
        default: Its value where nobody moves it; an int where only whole numbers make sense.
        unit: What is counted ("share", "steps", "relative L2 error", ...).
        lowest: The lowest value that makes sense; that of a share, where nothing is said.
        highest: The highest, likewise.
        why: What it decides, and the derivation of its default.
        above: The threshold of the same rule below which it must not be; None where there is none.
        option: The command line's short name for it ("--tau"); None where it has none.
    """

    code: str
    name: str
    default: float
    unit: str
    why: str
    lowest: float = 0.0
    highest: float = 1.0
    above: Threshold | None = None
    option: str | None = None

    @property
    def key(self) -> str:
        """Its full name: "AMP107.saturated"."""
        return f"{self.code}.{self.name}"

    @property
    def label(self) -> str:
        """Its name for a sentence, with the short one beside it: "AMP301.flushed (--tau)"."""
        return f"{self.key} ({self.option})" if self.option else self.key

    @property
    def whole(self) -> bool:
        """Only whole numbers make sense."""
        return isinstance(self.default, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedThreshold:
    """A threshold that the user has moved.

    Attributes:
        code: The rule's code.
        name: As in --threshold CODE.NAME=VALUE.
        value: What it was moved to.
        default: What it was moved from.
        unit: Of both.
    """

    code: Annotated[str, form(pattern="^AMP[0-9]{3}$")]
    name: Text
    value: Finite
    default: Finite
    unit: Text
