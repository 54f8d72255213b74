"""What a configuration file says, checked key by key: defaults of options, settings of rules, ignores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampdoctor.cli.settings.config_file import IGNORE_KEY, RULES_KEY, SHARED, ConfigFile, unknown_key, wrong_value
from ampdoctor.cli.settings.config_paths import placed
from ampdoctor.cli.settings.settings import EXPECTED, Kind, Setting
from ampdoctor.errors import UsageError

if TYPE_CHECKING:  # they know every rule, which --help does not need
    from ampdoctor.gates.findings import Ignore, RuleSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A value that stands in a file, and where."""

    value: Any
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration, as one command sees it.

    Attributes:
        file: Its name; None where there is none.
        prefix: What stands before each of its keys.
        defaults: Of the command's options, by key.
        rules: Settings of rules, by code.
        ignores: In the order in which they stand.
    """

    file: str | None = None
    prefix: str = ""
    defaults: Mapping[str, Default] = field(default_factory=dict)
    rules: Mapping[str, RuleSettings] = field(default_factory=dict)
    ignores: tuple[Ignore, ...] = ()

    @property
    def sets_something(self) -> bool:
        """Whether the file says anything to the command."""
        return bool(self.defaults or self.rules or self.ignores)


def read_config(file: ConfigFile, command: str, settings: Mapping[str, Sequence[Setting]]) -> Config:
    """Return what a file says to a command. The whole file is checked, whichever command runs.

    Args:
        file: The file.
        command: The command's name.
        settings: Of each command, by its name.

    Raises:
        UsageError: A key that there is not, or a value that it does not take.
    """
    everywhere: dict[str, Setting] = {s.key: s for group in settings.values() for s in group}
    own = {setting.key for setting in settings[command]}
    shared: dict[str, Default] = {}
    special: dict[str, Default] = {}
    rules: Mapping[str, RuleSettings] = {}
    ignores: tuple[Ignore, ...] = ()
    for key, value in file.table.items():
        if key == RULES_KEY:
            from ampdoctor.cli.settings.config_rules import read_rules

            rules = read_rules(file, value)
        elif key == IGNORE_KEY:
            from ampdoctor.cli.settings.config_rules import read_ignores

            ignores = read_ignores(file, value)
        elif key in settings and (
            isinstance(value, dict) or key not in everywhere
        ):  # `health` is an option of run, too
            read = _of_command(file, key, value, settings[key], everywhere)
            special = read if key == command else special
        elif key == "tool" and not file.prefix:
            raise UsageError(f"{file.name}: here the keys stand without `tool.ampdoctor`; that is for {SHARED}")
        elif key in everywhere:
            shared[key] = _checked(file, key, value, everywhere[key])
        else:
            raise unknown_key(file.place(key), key, [*everywhere, *settings, RULES_KEY, IGNORE_KEY])
    defaults = {**{key: default for key, default in shared.items() if key in own}, **special}
    return Config(file=file.name, prefix=file.prefix, defaults=defaults, rules=rules, ignores=ignores)


def _of_command(
    file: ConfigFile, command: str, table: Any, settings: Sequence[Setting], everywhere: Mapping[str, Setting]
) -> dict[str, Default]:
    """The keys of a command's own table."""
    if not isinstance(table, dict):
        raise wrong_value(file.place(command), "a table", table)
    known = {setting.key: setting for setting in settings}
    read = {}
    for key, value in table.items():
        place = f"{command}.{key}"
        if key not in known:
            if key in everywhere:
                raise UsageError(f"{file.place(place)}: `ampdoctor {command}` has no option --{key}")
            raise unknown_key(file.place(place), key, known)
        read[key] = _checked(file, place, value, known[key])
    return read


def _checked(file: ConfigFile, key: str, value: Any, setting: Setting) -> Default:
    place = file.place(key)
    if not _is(value, setting.kind):
        raise wrong_value(place, EXPECTED[setting.kind], value)
    for text in value if setting.kind == "list" else [value]:
        if setting.kind in ("text", "list") and not (isinstance(text, str) and text.isprintable()):
            raise UsageError(f"{place}: expected {EXPECTED[setting.kind]} without control characters")
    return Default(value=placed(file, place, setting.key, value), place=place)


def _is(value: Any, kind: Kind) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[Kind, Any] = {"boolean": bool, "integer": int, "number": int | float, "text": str, "list": list}
    return isinstance(value, types[kind])
