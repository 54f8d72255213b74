"""`[tool.ampdoctor.rules]` and `[[tool.ampdoctor.ignore]]`: what a project has decided about rules and findings."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from difflib import get_close_matches
from typing import Any, get_args

from ampdoctor.cli.settings.config_file import IGNORE_KEY, RULES_KEY, ConfigFile, unknown_key, wrong_value
from ampdoctor.diagnosis.catalogue import EXPIRED_IGNORE, UNUSED_IGNORE, check_threshold, find_rule, rules
from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Source
from ampdoctor.gates.findings import Ignore, RuleSettings, SeverityOrIgnore
from ampdoctor.reports.escape import is_seen

_MAX_IGNORES = 1000
"""Each is held against each finding, of which a hostile checkpoint has as many as it likes."""
_PATTERNS = ("tensor", "module", "file")
_IGNORE_KEYS = ("rule", *_PATTERNS, "reason", "expires")


def read_rules(file: ConfigFile, table: Any) -> Mapping[str, RuleSettings]:
    """Return the settings of rules, by code.

    Raises:
        UsageError: A rule that there is not, twice the same one, or a value that its key does not take.
    """
    if not isinstance(table, dict):
        raise wrong_value(file.place(RULES_KEY), "a table", table)
    rules: dict[str, RuleSettings] = {}
    for name, settings in table.items():
        place = file.place(f"{RULES_KEY}.{name}")
        code = _code(place, name)
        if code in rules:
            raise UsageError(f"{place}: {code} is there twice, by its code and by its name")
        if not isinstance(settings, dict):
            raise wrong_value(place, "a table", settings)
        rules[code] = _rule(place, code, settings)
    return rules


def read_ignores(file: ConfigFile, tables: Any) -> tuple[Ignore, ...]:
    """Return the ignores, in the order in which they stand.

    Raises:
        UsageError: One without rule or reason, an unknown key, or a value that its key does not take.
    """
    if not isinstance(tables, list):
        raise UsageError(
            f"{file.place(IGNORE_KEY)}: expected tables, [[{file.prefix}{IGNORE_KEY}]], each of one ignore"
        )
    if len(tables) > _MAX_IGNORES:
        raise UsageError(f"{file.place(IGNORE_KEY)}: more than {_MAX_IGNORES} ignores; for so many there is --baseline")
    lines = file.ignore_lines if len(file.ignore_lines) == len(tables) else (1,) * len(tables)
    return tuple(
        _ignore(file.place(f"{IGNORE_KEY}[{index}]"), table, Source(file.name, lines[index]))
        for index, table in enumerate(tables)
    )


def _rule(place: str, code: str, settings: Mapping[str, Any]) -> RuleSettings:
    severity = settings.get("severity")
    known = get_args(SeverityOrIgnore)
    if severity is not None and severity not in known:
        raise UsageError(f"{place}.severity: expected one of {', '.join(known)}")
    thresholds = {key: value for key, value in settings.items() if key != "severity"}
    for key, value in thresholds.items():
        movable = any(threshold.name == key for threshold in rules()[code].thresholds)
        if not movable and get_close_matches(key, ["severity"]):
            raise unknown_key(f"{place}.{key}", key, ["severity"])
        if movable and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise wrong_value(f"{place}.{key}", "a number", value)
        try:
            check_threshold(code, key, value)
        except UsageError as error:
            raise UsageError(f"{place}.{key}: {error}") from None
    return RuleSettings(severity=severity, thresholds=thresholds)


def _ignore(place: str, table: Any, written: Source) -> Ignore:
    if not isinstance(table, dict):
        raise wrong_value(place, "a table", table)
    for key, value in table.items():
        if key not in _IGNORE_KEYS:
            raise unknown_key(f"{place}.{key}", key, _IGNORE_KEYS)
        if key != "expires" and not isinstance(value, str):
            raise wrong_value(f"{place}.{key}", "a string", value)
    for key in ("rule", "reason"):
        if not is_seen(table.get(key, "")):
            raise UsageError(f"{place}: {key} is missing; an ignore says which rule, and why")
    code = _code(f"{place}.rule", table["rule"])
    if code in (UNUSED_IGNORE.code, EXPIRED_IGNORE.code):
        raise UsageError(f'{place}.rule: {code} is about ignores; `rules.{code}.severity = "ignore"` switches it off')
    expires = table.get("expires")
    if expires is not None and (not isinstance(expires, date) or isinstance(expires, datetime)):
        raise UsageError(f"{place}.expires: expected a date without quotes, such as 2027-01-31")
    patterns = {key: table.get(key) for key in _PATTERNS}
    return Ignore(rule=code, reason=table["reason"], expires=expires, written=written, **patterns)


def _code(place: str, name: str) -> str:
    try:
        return find_rule(name).code
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
