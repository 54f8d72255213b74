"""Reads and checks the configuration file: defaults of options, settings of rules, ignores."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typer.models import OptionInfo

from ampdoctor.cli.options import ONE_RUN
from ampdoctor.cli.output import repository_root
from ampdoctor.cli.process import NAMES_OF_STDOUT, note, read_text
from ampdoctor.diagnosis.catalogue import (
    EXPIRED_IGNORE,
    UNUSED_IGNORE,
    check_threshold,
    find_rule,
)
from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Source
from ampdoctor.gates.findings import Ignore, RuleSettings, SeverityOrIgnore

# -- settings: the options that a file and the environment may set, read from the commands' own signatures --

Kind = Literal["boolean", "integer", "number", "text", "list"]
EXPECTED: Mapping[Kind, str] = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "text": "a string",
    "list": "a list of strings",
}
_KINDS: Mapping[Any, Kind] = {bool: "boolean", int: "integer", float: "number", str: "text"}

NO_SETTINGS = frozenset({"config", "isolated", "show-config", "write-baseline", "module"})
"""Options that apply to one run. As a standing setting, --write-baseline would make every run its own baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOption:
    """An option that a configuration file may set."""

    parameter: str  # the Python name
    key: str  # the long option without its dashes
    kind: Kind
    choices: tuple[str, ...] = ()  # the allowed values, where there is a fixed set

    @property
    def option(self) -> str:
        """The long option."""
        return f"--{self.key}"

    def variables(self, command: str) -> list[str]:
        """Return the environment variables that set it for a command; the first takes precedence."""
        name = self.key.upper().replace("-", "_")
        return [f"AMPDOCTOR_{command.upper().replace('-', '_')}_{name}", f"AMPDOCTOR_{name}"]


def settings_of(function: Callable[..., Any]) -> tuple[ConfigOption, ...]:
    """Return the settings of a command with `Annotated[type, typer.Option("--name", ...)]` parameters."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotated, *metadata = get_args(parameter.annotation) or (None,)
        option = next((item for item in metadata if isinstance(item, OptionInfo)), None)
        if option is None:
            continue
        first = option.default  # inside `Annotated`, Typer stores the first option name as the default
        names = map(str, (first, *(option.param_decls or ())))
        key = next(name.removeprefix("--") for name in names if name.startswith("--"))
        kind, choices = _kind(annotated)
        if key not in NO_SETTINGS and ONE_RUN not in metadata:
            found.append(ConfigOption(parameter=name, key=key, kind=kind, choices=choices))
    return tuple(found)


def _kind(annotated: Any) -> tuple[Kind, tuple[str, ...]]:
    if get_origin(annotated) in (Union, UnionType):
        (annotated,) = (part for part in get_args(annotated) if part is not NoneType)
    if get_origin(annotated) is list:
        return "list", ()
    if get_origin(annotated) is Literal:
        return "text", tuple(map(str, get_args(annotated)))
    return _KINDS[annotated], ()


# -- the configuration file: where it is searched, and how it is read; nothing in it is executed --

RULES_KEY, IGNORE_KEY = "rules", "ignore"
OWN, SHARED = "ampdoctor.toml", "pyproject.toml"  # the first takes precedence; in the second: `[tool.ampdoctor]`
MAX_BYTES = 512 * 1024
_WHAT = "the configuration"
_MAX_DOTS = 500
"""Per line. Python's parser takes time and memory with the square of the parts of a dotted key: 40 kB took it 4 s, and
400 kB took more memory than the machine had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration file after reading."""

    name: str  # its path from the working directory
    found: bool  # not named by the user, so perhaps a stranger's; False: named
    prefix: str  # comes before each key: "tool.ampdoctor." or nothing
    table: Mapping[str, Any]  # the content, not yet checked
    ignore_lines: tuple[int, ...] = ()  # the line of each `[[ignore]]`, where it can be found

    @property
    def folder(self) -> Path:
        """Relative paths in the file start here."""
        return Path(self.name).parent

    def place(self, key: str) -> str:
        """Return a key with its file, for an error message."""
        return f"{self.name}: {self.prefix}{key}"


def load_config(named: str | None) -> ConfigFile | None:
    """Return the named configuration file, or the one that applies to the working directory; None where there is none.

    A file of another user is not read unless it is named: anybody could put one in /tmp, and it could make a damaged
    checkpoint pass. A line on stderr names it; an error would stop everybody who works there. A file that cannot be
    read or is not TOML raises UsageError.
    """
    if named is not None:
        return _read(Path(named), found=False)
    try:
        here = Path.cwd()
    except OSError:  # the folder was deleted
        return None
    for path in _candidates(here):
        if path.name == SHARED and not _is_ours(path):
            continue
        if not _foreign(path):
            return _read(path, found=True)
        name = os.path.relpath(path)
        note(f"ampdoctor: {name} is another user's and not read: --config {name} accepts it, --isolated is silent")
    return None


def _candidates(folder: Path) -> list[Path]:
    """Return the files in this folder and its parents, nearest first, up to the root of the repository."""
    paths = []
    root = repository_root(folder)
    for level in (folder, *folder.parents):
        paths += [path for name in (OWN, SHARED) if os.path.lexists(path := level / name)]
        if level == root:
            break
    return paths


def _is_ours(path: Path) -> bool:
    try:
        text = read_text(str(path), limit=MAX_BYTES, what=_WHAT, lenient=True)
        tool = _parse(text, str(path)).get("tool") if "ampdoctor" in text else None
    except UsageError:  # of one of the user's own, reading it says why
        return not _foreign(path)
    return isinstance(tool, dict) and "ampdoctor" in tool


def _read(path: Path, *, found: bool) -> ConfigFile:
    name = os.path.relpath(path) if found else str(path)
    text = read_text(name, limit=MAX_BYTES, what=_WHAT)
    shared = path.name == SHARED
    table = _parse(text, name)
    if shared:
        tool = table.get("tool")
        own = tool.get("ampdoctor") if isinstance(tool, dict) else None
        if own is None:
            raise UsageError(f"{name} has no table [tool.ampdoctor]")
        if not isinstance(own, dict):
            raise UsageError(f"{name}: tool.ampdoctor is no table")
        table = own
    return ConfigFile(
        name=name,
        found=found,
        prefix="tool.ampdoctor." if shared else "",
        table=table,
        ignore_lines=_ignore_lines(text, shared=shared),
    )


def _foreign(path: Path) -> bool:
    """Whether the file, or a link to it, belongs to a user who is neither this one nor root."""
    if not hasattr(os, "geteuid"):
        return False
    owners = {path.lstat().st_uid}
    with contextlib.suppress(OSError):  # a broken link: reading it reports the error
        owners.add(path.stat().st_uid)
    return not owners <= {os.geteuid(), 0}


def _parse(text: str, name: str) -> dict[str, Any]:
    import tomllib  # --help reads no file

    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise UsageError(f"{name}: line {number} has more than {_MAX_DOTS} dots; break it into several")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {error}") from None
    except (RecursionError, ValueError):  # an invalid date, an integer of too many digits
        raise UsageError(
            f"{name} is not TOML that can be read: it is nested too deeply, or a number is too long"
        ) from None


def _ignore_lines(text: str, *, shared: bool) -> tuple[int, ...]:
    own = r"tool\s*\.\s*ampdoctor\s*\.\s*ignore" if shared else "ignore"
    header = re.compile(rf"\s*\[\[\s*{own}\s*\]\]")
    return tuple(number for number, line in enumerate(text.split("\n"), 1) if header.match(line))


def unknown_key(place: str, key: str, known: Collection[str]) -> UsageError:
    """Return the error for an unknown key, with the nearest known one."""
    near = get_close_matches(key, sorted(known), n=1)
    return UsageError(f"{place}: there is no such key{f'; did you mean {near[0]}?' if near else ''}")


def wrong_value(place: str, expected: str, value: Any) -> UsageError:
    """Return the error for a value of the wrong type."""
    return UsageError(f"{place}: expected {expected}, not {type(value).__name__}")


# -- paths in a configuration file are relative to its folder --
#
# A file that was found may come from a stranger, inside a repository. So it may only write into its own folder, not to
# hidden files there (`.git`, `.github`, `.env` belong to other tools), and name code only by a path in that folder: a
# module name, such as `os`, is whatever Python finds. Reading executes nothing. What --config names may do all of this.

Use = Literal["writes", "writes forms", "exports", "runs code", "runs code from", "reads", "neither"]
_KEYS: Mapping[Use, tuple[str, ...]] = {
    "writes": ("health", "output", "save", "write-baseline"),
    "writes forms": ("report",),  # FORM=FILE
    "exports": ("export",),  # KIND=TARGET
    "runs code": ("batches", "loss", "model"),  # FILE.py:NAME or a module
    "runs code from": ("app-dir",),
    "reads": ("against", "baseline", "checkpoint", "config", "profile"),
}
USES: Mapping[str, Use] = {key: use for use, keys in _KEYS.items() for key in keys}
"""The use of each option's value that names a place; any other is "neither"."""


def placed(file: ConfigFile, place: str, key: str, value: Any) -> Any:
    """Return a setting's value with its paths relative to the working directory.

    `place` names the key in errors. Raises UsageError where a found file names something out of its reach.
    """
    match USES.get(key, "neither"):
        case "writes forms":
            pairs = (text.partition("=") for text in value)
            return [f"{form}{equals}{_one(file, place, path, writes=True)}" for form, equals, path in pairs]
        case "exports":
            return [_exported(file, place, text) for text in value]
        case "writes":
            return _one(file, place, value, writes=True)
        case "runs code":
            return _code(file, place, value, alone=key == "model")
        case "runs code from":
            return _one(file, place, value, runs=True)
        case "reads":
            return _one(file, place, value)
        case _:
            return value


def _exported(file: ConfigFile, place: str, text: str) -> str:
    """Return an export's target relative to the working directory. A found file may not name a server or account."""
    from ampdoctor.health.sinks.export import KINDS  # few runs need it

    name, equals, target = text.partition("=")
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None or not target.strip():
        return text  # the option itself reports it
    if kind.is_path and "://" not in target and not target.startswith(":"):
        return f"{name}{equals}{_one(file, place, os.path.expanduser(target), writes=True)}"  # noqa: PTH111 - a text
    if file.found:
        raise UsageError(f"{place}: {text} sends the run's numbers to where it says, and {_because(file)}")
    return text


def _code(file: ConfigFile, place: str, value: str, *, alone: bool) -> str:
    path, colon, name = value.rpartition(":")
    if alone and value.endswith(".py"):
        return _one(file, place, value, runs=True)
    if path.endswith(".py"):
        return f"{_one(file, place, path, runs=True)}{colon}{name}"
    if file.found and value.strip():
        said = f"{value} is a module, wherever Python finds it, and {_because(file)}"
        raise UsageError(f"{place}: {said}: name its file (FILE.py:NAME)")
    return value


def _one(file: ConfigFile, place: str, path: str, *, writes: bool = False, runs: bool = False) -> str:
    if not path.strip() or (writes and path in NAMES_OF_STDOUT):  # empty: the option itself reports it
        return path
    joined = os.path.normpath(file.folder / path)
    if file.found and (writes or runs):
        _refuse_outside(file, place, joined, written=writes)
    return f".{os.sep}{joined}" if joined.startswith("~") else joined  # a folder named `~...`, not a home folder


def _refuse_outside(file: ConfigFile, place: str, path: str, *, written: bool) -> None:
    folder, target = Path(os.path.realpath(file.folder)), Path(os.path.realpath(path))
    if not target.is_relative_to(folder):
        raise UsageError(f"{place}: {path} lies outside the file's own folder, and {_because(file)}")
    if written and any(part.startswith(".") for part in target.relative_to(folder).parts):
        raise UsageError(f"{place}: {path} is hidden, or in a hidden folder, and {_because(file)}")


def _because(file: ConfigFile) -> str:
    return f"{file.name} was found, not named with --config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A value from a file, and its file and key."""

    value: Any
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration, restricted to one command."""

    file: str | None = None  # its name; None: there is no file
    prefix: str = ""  # comes before each key
    defaults: Mapping[str, Default] = field(default_factory=dict)  # of the command's options, by key
    rules: Mapping[str, RuleSettings] = field(default_factory=dict)  # by code
    ignores: tuple[Ignore, ...] = ()  # in the file's order

    @property
    def sets_something(self) -> bool:
        """Whether the file sets anything for the command."""
        return bool(self.defaults or self.rules or self.ignores)


def read_config(file: ConfigFile, command: str, settings: Mapping[str, Sequence[ConfigOption]]) -> Config:
    """Return a file's settings for one command; the whole file is checked, by the `settings` of every command."""
    everywhere: dict[str, ConfigOption] = {s.key: s for group in settings.values() for s in group}
    own = {setting.key for setting in settings[command]}
    shared: dict[str, Default] = {}
    special: dict[str, Default] = {}
    rules: Mapping[str, RuleSettings] = {}
    ignores: tuple[Ignore, ...] = ()
    for key, value in file.table.items():
        if key == RULES_KEY:
            rules = read_rules(file, value)
        elif key == IGNORE_KEY:
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
    file: ConfigFile, command: str, table: Any, settings: Sequence[ConfigOption], everywhere: Mapping[str, ConfigOption]
) -> dict[str, Default]:
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


def _checked(file: ConfigFile, key: str, value: Any, setting: ConfigOption) -> Default:
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


# -- `[tool.ampdoctor.rules]` and `[[tool.ampdoctor.ignore]]` --

_PATTERNS = ("tensor", "module", "file")
_IGNORE_KEYS = ("rule", *_PATTERNS, "reason", "expires")


def read_rules(file: ConfigFile, table: Any) -> Mapping[str, RuleSettings]:
    """Return the settings of rules, by code. An unknown or repeated rule and a wrong value raise UsageError."""
    if not isinstance(table, dict):
        raise wrong_value(file.place(RULES_KEY), "a table", table)
    rules: dict[str, RuleSettings] = {}
    for name, settings in table.items():
        place = file.place(f"{RULES_KEY}.{name}")
        code = _rule_code(place, name)
        if code in rules:
            raise UsageError(f"{place}: {code} is there twice, under two names")
        if not isinstance(settings, dict):
            raise wrong_value(place, "a table", settings)
        rules[code] = _rule(place, code, settings)
    return rules


def read_ignores(file: ConfigFile, tables: Any) -> tuple[Ignore, ...]:
    """Return the ignores, in the file's order. A missing reason, an unknown key or a wrong value raises UsageError."""
    if not isinstance(tables, list):
        raise UsageError(
            f"{file.place(IGNORE_KEY)}: expected tables, [[{file.prefix}{IGNORE_KEY}]], each of one ignore"
        )
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
        if not table.get(key, "").strip():
            raise UsageError(f"{place}: {key} is missing; an ignore says which rule, and why")
    code = _rule_code(f"{place}.rule", table["rule"])
    if code in (UNUSED_IGNORE.code, EXPIRED_IGNORE.code):
        raise UsageError(f'{place}.rule: {code} is about ignores; `rules.{code}.severity = "ignore"` switches it off')
    expires = table.get("expires")
    if expires is not None and (not isinstance(expires, date) or isinstance(expires, datetime)):
        raise UsageError(f"{place}.expires: expected a date without quotes, such as 2027-01-31")
    patterns = {key: table.get(key) for key in _PATTERNS}
    return Ignore(rule=code, reason=table["reason"], expires=expires, written=written, **patterns)


def _rule_code(place: str, name: str) -> str:
    try:
        return find_rule(name).code
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
