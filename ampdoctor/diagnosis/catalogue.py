"""The catalogue of rules: what a rule is, its page, its thresholds, and what all rules find together.

A rule's file calls `register`, and nothing else lists it: `rules` imports every module of `diagnosis`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

from ampdoctor.errors import UsageError
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.location import NonFinite, Phase, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity, finding_order
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Moves, Threshold, Thresholds

# A rule's page, docs/rules/CODE.md: what a person reads about a rule, read from there and written nowhere else.


_INSTALLED = Path(__file__).with_name("pages")
"""Where the wheel puts docs/rules (pyproject.toml, force-include)."""
_IN_THE_TREE = Path(__file__).parents[2] / "docs" / "rules"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_ESCAPED = re.compile(r"\\([\\`*\[\]|_<])")

HEADINGS = ("What it means", "How it is decided", "Threshold", "What to do", "Where it is known to be wrong")
"""The sections of every page, in the order in which they are read and in that of the fields of `Page`."""


@dataclass(frozen=True, slots=True)
class Page:
    """The texts about a rule, each for the person who got the finding.

    Attributes:
        meaning: What a finding says, and what it does to training.
        decided: How it is decided, from which numbers.
        threshold: The threshold and why that one.
        action: What to do.
        wrong: Where it is known to be wrong, or silent.
    """

    meaning: str
    decided: str
    threshold: str
    action: str
    wrong: str

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Each (heading, text), in the order in which they are read."""
        return tuple(zip(HEADINGS, astuple(self), strict=True))


@cache
def read_page(code: str) -> Page:
    """Return the page of a rule; the same one is read once.

    Raises:
        FileNotFoundError: The rule has none.
        ValueError: Its sections are not those of `HEADINGS`.
    """
    file = pages_folder() / f"{code}.md"
    _, *parts = _HEADING.split(file.read_text(encoding="utf-8"))
    if tuple(parts[::2]) != HEADINGS:
        raise ValueError(f"{file}: expected the sections {', '.join(HEADINGS)}, in this order")
    return Page(*map(_prose, parts[1::2]))


def pages_folder() -> Path:
    """Return the folder of all pages: in an installed wheel beside this file, else in the source tree."""
    return _INSTALLED if _INSTALLED.is_dir() else _IN_THE_TREE


def _prose(section: str) -> str:
    """The section as plain text on one line, without its table."""
    lines = (line for line in section.splitlines() if not line.startswith("|"))
    return _ESCAPED.sub(r"\1", " ".join(" ".join(lines).split()))


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


# The catalogue of rules: every rule that a module of `diagnosis` registers, and what they find together.


_A_WORD = 4
"""Letters from which a part of a name says something."""
_A_DIGIT = 0.8
"""Likeness of codes that differ in one digit, or in the order of two."""
_A_SLIP = 0.9
"""Likeness from which a name can only be that one."""
_MANY = 8
"""Rules that a sentence can offer."""


@cache
def rules() -> Mapping[str, Rule]:
    """Return all rules by code, in the order of their codes; the first call imports every module of `diagnosis`."""
    folder = Path(__file__).parent
    for module in pkgutil.walk_packages([str(folder)], "ampdoctor.diagnosis."):
        importlib.import_module(module.name)
    return MappingProxyType(dict(sorted(REGISTERED.items())))


def judge(evidence: Any, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """Return what every rule on this kind of evidence finds, worst first.

    Args:
        evidence: A `CheckpointSummary`, a `CheckpointChange` or a `Trend`.
        thresholds: What counts as harmful, as too many.
    """
    rules()
    finders = sorted(FINDERS[type(evidence)], key=itemgetter(0))
    found = (finding for _, find in finders for finding in find(evidence, thresholds))
    return tuple(sorted(found, key=finding_order))


def codes_in(*places: str) -> frozenset[str]:
    """Return the codes of the rules that judge in these files or folders of `diagnosis` ("scan.log", "health")."""
    rules()
    inside = tuple(f"ampdoctor.diagnosis.{place}." for place in places)
    return frozenset(code for of in FINDERS.values() for code, find in of if f"{find.__module__}.".startswith(inside))


def find_rule(wanted: str) -> Rule:
    """The rule with a code or a name, in any case.

    Raises:
        UsageError: There is none; the sentence names near ones.
    """
    key = wanted.strip()
    for rule in rules().values():
        if key.upper() == rule.code or key.lower() == rule.name:
            return rule
    near = _near(key)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `ampdoctor rule` lists them."
    raise UsageError(f"There is no rule {wanted!r}{hint}")


def _near(key: str) -> list[str]:
    """Codes that begin with the same digits, names with that word in them, else what is spelt nearly so."""
    digits, word = "".join(filter(str.isdecimal, key)), key.lower().replace("_", "-").replace(" ", "-")
    codes = [code for code in rules() if digits and code.startswith(f"AMP{digits}")]
    names = [rule.name for rule in rules().values() if not digits and len(word) >= _A_WORD and word in rule.name]
    found = codes or names
    if not found and digits:
        found = difflib.get_close_matches(f"AMP{digits}", rules(), n=_MANY, cutoff=_A_DIGIT)
    elif not found:
        spelt = [rule.name for rule in rules().values()]
        found = difflib.get_close_matches(word, spelt, n=1, cutoff=_A_SLIP) or difflib.get_close_matches(word, spelt)
    return found[:_MANY]


# Moving thresholds: which there are, and their values in force once a user has moved some.


_CODE = re.compile(r"AMP\d{3}")


def all_thresholds() -> Mapping[str, Threshold]:
    """Return all thresholds by their full names ("AMP107.saturated"), by rule in the order of the codes."""
    return {threshold.key: threshold for rule in rules().values() for threshold in rule.thresholds}


def thresholds_from(*layers: Moves) -> Thresholds:
    """The thresholds with these values moved.

    Args:
        layers: Values by code and name; a later layer wins over those before it.

    Raises:
        UsageError: A code or a name that is not known, a value that is no number or out of its range, or values that
            contradict each other.
    """
    values: dict[str, float] = {}
    for layer in layers:
        for code, names in layer.items():
            values |= {(found := _find(code, name)).key: _checked(found, value) for name, value in names.items()}
    thresholds = Thresholds(
        tuple((t, values[t.key]) for t in all_thresholds().values() if values.get(t.key, t.default) != t.default)
    )
    for threshold in all_thresholds().values():
        least = threshold.above
        if least is not None and thresholds[threshold] < thresholds[least]:
            raise UsageError(
                f"{threshold.label} is {thresholds[threshold]:g}, below {least.label}, which is {thresholds[least]:g}: "
                "they must ascend"
            )
    return thresholds


def check_threshold(code: str, name: str, value: float) -> None:
    """Refuse a value that no combination of others could make right.

    Raises:
        UsageError: The code or the name is not known, or the value is no number or out of its range.
    """
    _checked(_find(code, name), value)


def _find(code: str, name: str) -> Threshold:
    found = all_thresholds().get(f"{code}.{name}")
    if found is not None:
        return found
    names = [threshold.name for threshold in rules()[code].thresholds] if code in rules() else []
    if names:
        raise UsageError(f"{code} has no threshold {name!r}; it has {', '.join(names)}")
    near = difflib.get_close_matches(code.upper(), {threshold.code for threshold in all_thresholds().values()}, n=1)
    asked = _CODE.fullmatch(code) is not None  # another rule's code is no slip of the finger
    hint = f"did you mean {near[0]}?" if near and not asked else "`ampdoctor rule CODE` shows a rule's."
    raise UsageError(f"{code} is no rule with a threshold that can be moved; {hint}")


def _checked(threshold: Threshold, value: Any) -> float:
    """The value, an int where it is whole and only that makes sense."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{threshold.label} is {value!r}, which is no number")
    if not threshold.lowest <= value <= threshold.highest:
        raise UsageError(
            f"{threshold.label} is {value:g}, not between {threshold.lowest:g} and {threshold.highest:g} "
            f"({threshold.unit})"
        )
    if threshold.whole and value != int(value):
        raise UsageError(f"{threshold.label} is {value:g}, not a whole number ({threshold.unit})")
    return int(value) if threshold.whole else float(value)


# A finding about a checkpoint: its rule's name and help, and the checkpoint's step, filled in.


NOT_REPLAYED = "A scan reads the file only; bisect-nan --checkpoint replays the run with the change."
"""Why a scan's prescription is not verified."""


def checkpoint_finding(
    summary: CheckpointSummary,
    rule: Rule,
    severity: Severity,
    message: str,
    *,
    evidence: Mapping[str, Any],
    phase: Phase = "checkpoint",
    module: str = "",
    op: str | None = None,
    born: NonFinite = "none",
    tensor: str | None = None,
    file: str | None = None,
    also: Iterable[Where] = (),
    global_step: int | None = None,
    cause: str | None = None,
    prescription: Prescription | None = None,
) -> Finding:
    """A finding of a rule.

    Args:
        summary: The checkpoint.
        rule: Whose finding it is.
        severity: How bad it is here.
        message: One sentence with the numbers that matter.
        evidence: The numbers behind it; JSON values.
        phase: As in `Where`.
        module: As in `Where`.
        op: As in `Where`.
        born: What is non-finite there.
        tensor: As in `Where`.
        file: As in `Where`; "" for none.
        also: As in `Finding`.
        global_step: Where it began in the run; None: the checkpoint's own step.
        cause: As in `Finding`.
        prescription: The change.
    """
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        message=message,
        where=Where(
            phase=phase,
            global_step=summary.global_step if global_step is None else global_step,
            module=module,
            op=op,
            nonfinite=born,
            tensor=tensor,
            file=file or None,
        ),
        also=tuple(also),
        cause=cause,
        evidence=evidence,
        help=rule.page.action,
        prescription=prescription,
    )


# AMP911 and AMP912: an ignore of the configuration that has outlived its use; `gates` finds it.


UNUSED_IGNORE = register(
    "AMP911",
    "unused-ignore",
    "An ignore of the configuration fits nothing that was found",
    worst="warning",
    commands=(),
)
EXPIRED_IGNORE = register(
    "AMP912", "expired-ignore", "An ignore of the configuration is past its date", worst="warning", commands=()
)
