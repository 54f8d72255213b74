"""The catalogue of rules: a rule, its page, its thresholds, and what all rules find together.

A rule's file calls `rule`. There is no other list: `rules` imports every module of `diagnosis`.
"""

from __future__ import annotations

import difflib
import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, cast

from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import SEVERITIES, Finding, Prescription, PrescriptionKind, Severity, finding_order
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Moves, Threshold, Thresholds

# -- pages: docs/rules/CODE.md is the only source of a rule's name, title, worst severity, thresholds and texts --


_INSTALLED = Path(__file__).with_name("pages")  # the wheel puts docs/rules there (pyproject.toml, force-include)
_IN_THE_TREE = Path(__file__).parents[2] / "docs" / "rules"
_HEAD = re.compile(r"# (AMP\d{3}) ([a-z0-9]+(?:-[a-z0-9]+)*)\n\n(.+)\. Worst severity: (error|warning|note)\.\n\n")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_TABLE = ("| `--threshold` | default | unit | from, to | what it decides |", "| --- | --- | --- | --- | --- |")
_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"
_ROW = re.compile(
    rf"\| `(AMP\d{{3}})\.(\w+)` \| ({_NUMBER}) \| ([^|]+) "
    rf"\| ({_NUMBER}), ({_NUMBER})(?:, not below `(\w+)`)? \| (.+) \|"
)
_ESCAPED = re.compile(r"\\([\\`*\[\]|_<])")

HEADINGS = {
    "meaning": "What it means",
    "decided": "How it is decided",
    "threshold": "Threshold",
    "action": "What to do",
    "wrong": "Where it is known to be wrong",
}
"""The sections of every page, in their order, by their keys in `Page.texts`."""

EXAMPLE = {"example": "Example", "instead": "Use instead", "cost": "What the change costs"}
"""The sections that a page may have behind them: all three, or none."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a rule."""

    name: str  # stable, kebab-case
    title: str  # one line
    worst: Severity  # the worst severity that a finding can have
    thresholds: Mapping[str, Threshold]  # those that a user may move, by name
    texts: Mapping[str, str]  # the sections, by the keys of `HEADINGS` and `EXAMPLE`

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Each (heading, text) in the order of the page, without the example."""
        return tuple((heading, self.texts[key]) for key, heading in HEADINGS.items())


@cache
def read_page(code: str) -> Page:
    """Return the page of a rule, cached; raises ValueError with one sentence where a part is missing or malformed."""
    file = pages_folder() / f"{code}.md"
    text = file.read_text(encoding="utf-8")
    top, *parts = _HEADING.split(text)
    head = _HEAD.fullmatch(top)
    if head is None or head[1] != code:
        raise ValueError(f"{file}: expected '# {code} its-name', and 'Its title. Worst severity: error.' below it")
    headings = HEADINGS if len(parts) <= 2 * len(HEADINGS) else HEADINGS | EXAMPLE
    if tuple(parts[::2]) != tuple(headings.values()):
        raise ValueError(f"{file}: expected the sections {', '.join(headings.values())}, in this order")
    try:
        thresholds = _thresholds(code, [line for line in text.splitlines() if line.startswith("|")])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    texts = dict(zip(headings, map(_prose, parts[1::2]), strict=True))
    return Page(head[2], _plain(head[3]), cast("Severity", head[4]), thresholds, texts)


def _thresholds(code: str, table: list[str]) -> Mapping[str, Threshold]:
    """Return the thresholds of a page's table; a default without a point or an exponent takes whole numbers only."""
    found: dict[str, Threshold] = {}
    if table and tuple(table[:2]) != _TABLE:
        raise ValueError(f"expected a table that begins with {_TABLE[0]!r}")
    for line in table[2:]:
        row = _ROW.fullmatch(line)
        if row is None or row[1] != code or (row[7] and row[7] not in found):
            raise ValueError(f"expected the five cells of a threshold of {code}, not {line!r}")
        _, name, default, unit, lowest, highest, above, why = row.groups()
        value, low, high = (int(float(one)) if default.isdigit() else float(one) for one in (default, lowest, highest))
        least = found[above] if above else None
        found[name] = Threshold(code, name, value, unit, low, high, _plain(why), least)
    return found


def pages_folder() -> Path:
    """Return the folder of all pages: beside this file in an installed wheel, else in the source tree."""
    return _INSTALLED if _INSTALLED.is_dir() else _IN_THE_TREE


def _prose(section: str) -> str:
    """Return the words of a section as one paragraph, and below it its code, line by line."""
    words, _, code = section.partition("```python\n")
    lines = (line for line in words.splitlines() if not line.startswith("|"))
    return "\n\n".join(filter(None, (_plain(" ".join(" ".join(lines).split())), code.rpartition("\n```")[0])))


def _plain(markdown: str) -> str:
    return _ESCAPED.sub(r"\1", markdown)


Command: TypeAlias = Literal["scan", "bisect-nan", "profile", "recommend", "run", "health", "plan"]
Evidence = TypeVar("Evidence")
Finder: TypeAlias = Callable[[Evidence, Thresholds], Iterable[Finding]]

SCANNED: tuple[Command, ...] = ("scan",)
"""A replay also judges the checkpoint that it loads. Where its report does not mention the checkpoint, the replay may
not have examined it."""
REPLAYED: tuple[Command, ...] = ("bisect-nan", "recommend")
MEASURED: tuple[Command, ...] = ("profile", "recommend")
WATCHED: tuple[Command, ...] = ("run", "health")
RECOMMENDED: tuple[Command, ...] = ("recommend",)
PLANNED: tuple[Command, ...] = ("plan",)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the catalogue; its page has all that is said about it, and is read when it is first asked for."""

    code: str  # stable ("AMP101"): a code never changes its meaning
    commands: tuple[Command, ...]  # these always apply the rule; none for a rule on the configuration itself
    ruins_checkpoint: bool = False  # a finding means lost values: only an earlier checkpoint helps

    def __getitem__(self, name: str) -> Threshold:
        """Its threshold of this name."""
        return self.page.thresholds[name]

    @property
    def page(self) -> Page:
        """The page of the rule."""
        return read_page(self.code)

    @property
    def name(self) -> str:
        """The page's name of it ("gradient-jump"), which never changes."""
        return self.page.name

    @property
    def title(self) -> str:
        """What it says, in one line."""
        return self.page.title

    @property
    def worst(self) -> Severity:
        """The worst severity that a finding can have."""
        return self.page.worst

    @property
    def thresholds(self) -> tuple[Threshold, ...]:
        """Those that a user may move, in the order of the page."""
        return tuple(self.page.thresholds.values())

    def finding(
        self,
        severity: Severity,
        message: str,
        *,
        where: Where,
        evidence: Mapping[str, Any],
        also: tuple[Where, ...] = (),
        cause: str | None = None,
        advice: str | None = None,
        prescription: Prescription | None = None,
    ) -> Finding:
        """Make a finding of this rule; `message` is one sentence, and `advice` replaces what the page says to do."""
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity,
            message=message,
            where=where,
            also=also,
            cause=cause,
            evidence=evidence,
            help=self.page.texts["action"] if advice is None else advice,
            prescription=prescription,
        )

    def judges(self, evidence: type[Evidence]) -> Callable[[Finder[Evidence]], Finder[Evidence]]:
        """Register the decorated function: `judge` calls it with each evidence of this class and the thresholds.

        A rule may judge several classes of evidence, or none: a workflow calls rules by name that only a replay can
        decide.
        """

        def registered(find: Finder[Evidence]) -> Finder[Evidence]:
            FINDERS.setdefault(evidence, []).append((self.code, find))
            return find

        return registered


REGISTERED: dict[str, Rule] = {}  # by code; complete once `rules` has imported every module of `diagnosis`
FINDERS: dict[type, list[tuple[str, Finder[Any]]]] = {}
"""By the class of evidence, each with the rule's code; complete once `rules` was called."""


def rule(code: str, commands: tuple[Command, ...], *, ruins_checkpoint: bool = False) -> Rule:
    """Add a rule to the catalogue; raises ValueError where the code is taken."""
    if code in REGISTERED:
        raise ValueError(f"{code} is registered twice")
    REGISTERED[code] = Rule(code, commands, ruins_checkpoint)
    return REGISTERED[code]


# -- all rules --


@cache
def rules() -> Mapping[str, Rule]:
    """Return all rules by code, in the order of their codes; the first call imports every module of `diagnosis`."""
    folder = Path(__file__).parent
    for module in pkgutil.walk_packages([str(folder)], "ampdoctor.diagnosis."):
        importlib.import_module(module.name)
    return MappingProxyType(dict(sorted(REGISTERED.items())))


def judge(evidence: Any, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """Return what every rule on this kind of evidence finds, worst first."""
    rules()
    finders = sorted(FINDERS[type(evidence)], key=itemgetter(0))
    found = (finding for _, find in finders for finding in find(evidence, thresholds))
    return tuple(sorted(found, key=finding_order))


_EFFECTS = frozenset(f"AMP7{number:02}" for number in (2, 5, 20, 21, 22, 23, 24, 27, 28, 39, 40, 42))
"""Rules on runs over time whose findings may be effects of one sick step."""
_SOON = 256  # steps after a diagnosed step in which they count as its effects


def effects(findings: Sequence[Finding]) -> Mapping[int, int]:
    """Return the effects among a log's findings: by place, the place of the diagnosed step's finding behind them."""
    looked = [(at, one) for at, one in enumerate(findings) if one.code < "AMP600" and one.where.step is not None]
    found: dict[int, int] = {}
    for at, one in enumerate(findings):
        for behind, cause in looked if one.code in _EFFECTS else ():
            as_grave = SEVERITIES.index(cause.severity) <= SEVERITIES.index(one.severity)
            later = (one.where.step or 0) - (cause.where.step or 0)
            if as_grave and 0 <= later <= _SOON and one.where.file == cause.where.file:
                found.setdefault(at, behind)
    return found


def codes_in(*places: str) -> frozenset[str]:
    """Return the codes of the rules that judge in these files or folders of `diagnosis` ("scan.scaler")."""
    rules()
    inside = tuple(f"ampdoctor.diagnosis.{place}." for place in places)
    return frozenset(code for of in FINDERS.values() for code, find in of if f"{find.__module__}.".startswith(inside))


ALIASES: Mapping[str, str] = MappingProxyType(
    {"AMP701": "AMP722", "AMP703": "AMP722", "AMP704": "AMP720", "AMP706": "AMP723", "AMP707": "AMP723"}
)
"""Codes of `scan`'s own rules on logs, and the rules of `health` that took their place; users may still write them."""


def find_rule(wanted: str) -> Rule:
    """Return the rule with a code or a name, in any case; raises UsageError with similar names if there is none."""
    key = wanted.strip()
    for one in rules().values():
        if ALIASES.get(key.upper(), key.upper()) == one.code or key.lower() == one.name:
            return one
    known = [name for rule in rules().values() for name in (rule.code.lower(), rule.name)]
    near = [name.upper() if name.startswith("amp") else name for name in difflib.get_close_matches(key.lower(), known)]
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `ampdoctor rule` lists them."
    raise UsageError(f"There is no rule {wanted!r}{hint}")


# -- numbers and dtypes in a sentence --


_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8 e4m3"}
_SHORT |= {"float8_e5m2": "fp8 e5m2"}


def figure(number: float) -> str:
    """Format a number in about four digits, large ones with separators: `65,504`, `0.0123`, `3.39e+38`."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.4g}"


def scale_text(scale: float | None) -> str:
    """Format a loss scale: `65,536`, and a power of two below 1 or above 2^24 as `2^-18`; None is `1`."""
    scale = 1.0 if scale is None else scale
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5 and not 1 <= scale <= 2**24:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:,.10g}"


def short(dtype: str) -> str:
    """Format a dtype for prose: "fp16" for "float16"; one that has no short name as it is."""
    return _SHORT.get(dtype, dtype)


# -- thresholds that a user has moved --


_CODE = re.compile(r"AMP\d{3}")


def all_thresholds() -> Mapping[str, Threshold]:
    """Return all thresholds by their full names ("AMP107.saturated"), by rule in the order of the codes."""
    return {threshold.key: threshold for rule in rules().values() for threshold in rule.thresholds}


def thresholds_from(*layers: Moves) -> Thresholds:
    """Return the thresholds with these values, by code and name; a later layer overrides those before it.

    Raises UsageError for an unknown code or name, a value that is no number or out of range, and values that contradict
    each other.
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
                f"{threshold.key} is {thresholds[threshold]:g}, below {least.key}, which is {thresholds[least]:g}: "
                "they must ascend"
            )
    return thresholds


def check_threshold(code: str, name: str, value: float) -> None:
    """Raise UsageError where the threshold is unknown, or no other thresholds could make the value valid."""
    _checked(_find(code, name), value)


def _find(code: str, name: str) -> Threshold:
    code = ALIASES.get(code, code)
    found = all_thresholds().get(f"{code}.{name}")
    if found is not None:
        return found
    names = [f"{one.name} (default {one.default:g})" for one in rules()[code].thresholds] if code in rules() else []
    if names:
        raise UsageError(f"{code} has no threshold {name!r}; it has {', '.join(names)}")
    near = difflib.get_close_matches(code.upper(), {threshold.code for threshold in all_thresholds().values()}, n=1)
    asked = _CODE.fullmatch(code) is not None  # another rule's code is no misspelling
    hint = f"did you mean {near[0]}?" if near and not asked else "`ampdoctor rule CODE` shows a rule's."
    raise UsageError(f"{code} is no rule with a threshold that can be moved; {hint}")


def _checked(threshold: Threshold, value: Any) -> float:
    """Return the value, as an int where the threshold is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{threshold.key} is {value!r}, which is no number")
    if not threshold.lowest <= value <= threshold.highest:
        raise UsageError(
            f"{threshold.key} is {value:g}, not between {threshold.lowest:g} and {threshold.highest:g} "
            f"({threshold.unit})"
        )
    if threshold.whole and value != int(value):
        raise UsageError(f"{threshold.key} is {value:g}, not a whole number ({threshold.unit})")
    return int(value) if threshold.whole else float(value)


_A_SCAN = "A scan reads the file only; bisect-nan --checkpoint replays the run with the change."


def not_replayed(
    kind: PrescriptionKind, value: Any, detail: str, alternatives: tuple[Prescription, ...] = ()
) -> Prescription:
    """Return a change that a scan proposes, which no replay has verified."""
    made = Prescription(kind=kind, value=value, status="not_run", reason=_A_SCAN, detail=detail)
    return replace(made, alternatives=alternatives)


# AMP911 and AMP912: unused and expired ignores of the configuration; `gates` finds them.


UNUSED_IGNORE = rule("AMP911", ())
EXPIRED_IGNORE = rule("AMP912", ())
