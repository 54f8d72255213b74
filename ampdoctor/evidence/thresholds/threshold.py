"""One number of a rule that a user may move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ampdoctor.evidence.codec import Finite, Text, form


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One number by which a rule judges, and the reason for its default.

    Mathematical facts (a format's largest number, whether a value is finite) are not thresholds: nobody can move them.

    Attributes:
        code: The rule's code ("AMP107").
        name: Its name within the rule, as a key of the configuration ("saturated").
        default: Its value if nobody moves it; an int if only whole numbers make sense.
        unit: What is counted ("share", "steps", "relative L2 error", ...).
        lowest: The lowest value that makes sense; the default is that of a share.
        highest: The highest value that makes sense; the default is that of a share.
        why: What it decides, and the derivation of its default.
        above: The threshold of the same rule below which it must not be; None if there is none.
        option: The command line's short name for it ("--tau"); None if it has none.
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
        """Its name in a sentence, with the short name beside it: "AMP301.flushed (--tau)"."""
        return f"{self.key} ({self.option})" if self.option else self.key

    @property
    def whole(self) -> bool:
        """True if only whole numbers make sense."""
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
