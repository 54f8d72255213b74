"""What a rule is: the page behind a finding's code, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.evidence.report import Severity
from ampdoctor.evidence.thresholds import thresholds_of
from ampdoctor.evidence.thresholds.threshold import Threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the catalogue; each text is for the person who got the finding.

    Attributes:
        code: Stable code ("AMP101"); it never changes its meaning.
        name: Stable kebab-case name.
        title: One line.
        worst: The worst severity that it can have.
        meaning: What a finding says, and what it does to training.
        decided: How it is decided, from which numbers.
        threshold: The threshold and why that one.
        action: What to do.
        wrong: Where it is known to be wrong, or silent.
    """

    code: str
    name: str
    title: str
    worst: Severity
    meaning: str
    decided: str
    threshold: str
    action: str
    wrong: str

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """The page's parts in the order in which they are read, each (heading, text)."""
        return (
            ("What it means", self.meaning),
            ("How it is decided", self.decided),
            ("Threshold", self.threshold),
            ("What to do", self.action),
            ("Where it is known to be wrong", self.wrong),
        )

    @property
    def thresholds(self) -> tuple[Threshold, ...]:
        """The numbers by which it judges and which a user may move."""
        return thresholds_of(self.code)
