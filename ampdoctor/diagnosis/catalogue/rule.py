"""What a rule is, and how it registers itself: its file says `register`, and nothing else lists it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from ampdoctor.diagnosis.catalogue.page import Page, read_page
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

Command: TypeAlias = Literal["scan", "bisect-nan", "profile", "recommend", "run", "health", "plan"]
Evidence = TypeVar("Evidence")
Finder: TypeAlias = Callable[[Evidence, Thresholds], Iterable[Finding]]

SCANNED: tuple[Command, ...] = ("scan",)
"""A replay judges the checkpoint that it loads as well, where it is given one: what it does not say of it, it may not
have looked at."""
REPLAYED: tuple[Command, ...] = ("bisect-nan", "recommend")
MEASURED: tuple[Command, ...] = ("profile", "recommend")
WATCHED: tuple[Command, ...] = ("run", "health")
RECOMMENDED: tuple[Command, ...] = ("recommend",)
PLANNED: tuple[Command, ...] = ("plan",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the catalogue; what a person reads about it is its page.

    Attributes:
        code: Stable code ("AMP101"); it never changes its meaning.
        name: Stable kebab-case name.
        title: One line.
        worst: The worst severity that it can have.
        commands: Those that always look for what it finds; none for a rule on the configuration itself.
        thresholds: The numbers by which it judges and which a user may move, in the order of its page.
        ruins_checkpoint: Values are lost with a finding, so that only an earlier checkpoint helps.
    """

    code: str
    name: str
    title: str
    worst: Severity
    commands: tuple[Command, ...]
    thresholds: tuple[Threshold, ...] = ()
    ruins_checkpoint: bool = False

    @property
    def page(self) -> Page:
        """What a person reads about it."""
        return read_page(self.code)

    def judges(self, evidence: type[Evidence]) -> Callable[[Finder[Evidence]], Finder[Evidence]]:
        """Register the function below it: wherever such evidence is judged, it says what this rule finds.

        A rule may judge several kinds of evidence, or none: what only a replay can decide, a workflow asks by name.

        Args:
            evidence: The class that the function takes, beside the thresholds in force.
        """

        def registered(find: Finder[Evidence]) -> Finder[Evidence]:
            FINDERS.setdefault(evidence, []).append((self.code, find))
            return find

        return registered


REGISTERED: dict[str, Rule] = {}
"""By code; whole once every module of `diagnosis` is imported, which `catalogue.rules` does."""
FINDERS: dict[type, list[tuple[str, Finder[Any]]]] = {}
"""By the kind of evidence that they judge, with their rules' codes; whole likewise."""


def register(
    code: str,
    name: str,
    title: str,
    *,
    worst: Severity,
    commands: tuple[Command, ...],
    thresholds: tuple[Threshold, ...] = (),
    ruins_checkpoint: bool = False,
) -> Rule:
    """Enter a rule into the catalogue, from the file of its function; the arguments are as in `Rule`.

    Raises:
        ValueError: The code is another rule's already.
    """
    if code in REGISTERED:
        raise ValueError(f"{code} is registered twice")
    REGISTERED[code] = Rule(
        code=code,
        name=name,
        title=title,
        worst=worst,
        commands=commands,
        thresholds=thresholds,
        ruins_checkpoint=ruins_checkpoint,
    )
    return REGISTERED[code]
