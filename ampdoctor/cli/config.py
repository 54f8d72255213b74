"""Reads and checks the configuration file: defaults of options, settings of rules, ignores; nothing in it is executed.

The options that it may set are read from the commands' own: all but those that Typer may not take from the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ampdoctor.cli.output import repository_root
from ampdoctor.cli.process import NAMES_OF_STDOUT, note, read_text
from ampdoctor.diagnosis.catalogue import EXPIRED_IGNORE, UNUSED_IGNORE, check_threshold, find_rule
from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Source
from ampdoctor.gates.findings import Ignore, RuleSettings, SeverityOrIgnore

EXPECTED: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a string",
    list: "a list of strings",
}
RULES_KEY, IGNORE_KEY = "rules", "ignore"
OWN, SHARED = "ampdoctor.toml", "pyproject.toml"  # the first takes precedence; in the second: `[tool.ampdoctor]`
MAX_BYTES = 512 * 1024
_WHAT = "the configuration"
_MAX_DOTS = 500
"""Per line. Python's parser takes time and memory with the square of the parts of a dotted key: 40 kB took it 4 s, and
400 kB took more memory than the machine had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration file, and what it sets for one command."""

    file: str | None = None  # its path from the working directory; None: there is no file
    found: bool = False  # not named by the user, so perhaps a stranger's
    prefix: str = ""  # comes before each key: "tool.ampdoctor." or nothing
    table: Mapping[str, Any] = field(default_factory=dict)  # the whole content, as it was parsed
    ignore_lines: tuple[int, ...] = ()  # the line of each `[[ignore]]`, where it can be found
    values: Mapping[str, Any] = field(default_factory=dict)  # of the command's options, by key
    places: Mapping[str, str] = field(default_factory=dict)  # where each of them is written
    rules: Mapping[str, RuleSettings] = field(default_factory=dict)  # by code
    ignores: tuple[Ignore, ...] = ()  # in the file's order

    def place(self, key: str) -> str:
        """Return a key with its file, for a message."""
        return f"{self.file}: {self.prefix}{key}"


Settings = Mapping[str, Any]
"""Typer's options that a file may set, by key: the long option without its dashes."""


def settings_of(options: Collection[Any]) -> dict[str, Any]:
    """Return those of a command's options that a file and the environment may set, by key."""
    named = {one.name: next((o[2:] for o in one.opts if o.startswith("--")), None) for one in options}
    return {key: one for one in options if (key := named[one.name]) and one.allow_from_autoenv}


def type_of(option: Any) -> type:
    """Return what a file has to give for an option: bool, int, str or list."""
    annotation = option.type_descriptor.annotation
    origin: Any = get_origin(annotation)
    return str if origin is Literal else origin or annotation


# -- where the file is searched, and how it is read --


def load_config(named: str | None) -> Config:
    """Return the content of the named file, or of the one that applies to the working directory, if there is one.

    A file of another user is not read unless it is named: anybody could put one in /tmp, and it could make a damaged
    checkpoint pass. A line on stderr names it; an error would stop everybody who works there. A file that cannot be
    read or is not TOML raises UsageError.
    """
    if named is not None:
        return _read(Path(named), found=False)
    try:
        here = Path.cwd()
    except OSError:  # the folder was deleted
        return Config()
    for path in _candidates(here):
        if path.name == SHARED and not _is_ours(path):
            continue
        if not _foreign(path):
            return _read(path, found=True)
        name = os.path.relpath(path)
        note(f"ampdoctor: {name} is another user's and not read: --config {name} accepts it, --isolated is silent")
    return Config()


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


def _read(path: Path, *, found: bool) -> Config:
    name = os.path.relpath(path) if found else str(path)
    text = read_text(name, limit=MAX_BYTES, what=_WHAT)
    shared = path.name == SHARED
    table = _parse(text, name)
    if shared:
        tool = table.get("tool")
        table = tool.get("ampdoctor") if isinstance(tool, dict) else None  # type: ignore[assignment]  # checked below
        if table is None:
            raise UsageError(f"{name} has no table [tool.ampdoctor]")
        if not isinstance(table, dict):
            raise UsageError(f"{name}: tool.ampdoctor is no table")
    own = r"tool\s*\.\s*ampdoctor\s*\.\s*ignore" if shared else "ignore"
    header = re.compile(rf"\s*\[\[\s*{own}\s*\]\]")
    lines = tuple(number for number, line in enumerate(text.split("\n"), 1) if header.match(line))
    prefix = "tool.ampdoctor." if shared else ""
    return Config(file=name, found=found, prefix=prefix, table=table, ignore_lines=lines)


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


# -- what it sets for a command --


def read_config(config: Config, command: str, settings: Mapping[str, Settings]) -> Config:
    """Return the configuration for one command; the whole file is checked, by the `settings` of every command."""
    everywhere = {key: option for of_command in settings.values() for key, option in of_command.items()}
    own: dict[str, tuple[Any, str]] = {}
    special: dict[str, tuple[Any, str]] = {}
    rules: Mapping[str, RuleSettings] = {}
    ignores: tuple[Ignore, ...] = ()
    for key, value in config.table.items():
        if key == RULES_KEY:
            rules = _rules(config, value)
        elif key == IGNORE_KEY:
            ignores = _ignores(config, value)
        elif key in settings and (isinstance(value, dict) or key not in everywhere):  # `health` is an option, too
            read = _of_command(config, key, value, settings[key], everywhere)
            special = read if key == command else special
        elif key == "tool" and not config.prefix:
            raise UsageError(f"{config.file}: here the keys stand without `tool.ampdoctor`; that is for {SHARED}")
        elif key not in everywhere:
            raise _unknown_key(config.place(key), key, [*everywhere, *settings, RULES_KEY, IGNORE_KEY])
        else:
            checked = _checked(config, config.place(key), key, value, everywhere[key])
            own |= {key: (checked, config.place(key))} if key in settings[command] else {}
    own |= special
    values, places = ({key: pair[at] for key, pair in own.items()} for at in (0, 1))
    return replace(config, values=values, places=places, rules=rules, ignores=ignores)


def _of_command(
    config: Config, command: str, table: Any, known: Settings, everywhere: Settings
) -> dict[str, tuple[Any, str]]:
    if not isinstance(table, dict):
        raise _wrong_value(config.place(command), "a table", table)
    read = {}
    for key, value in table.items():
        place = config.place(f"{command}.{key}")
        if key not in known:
            if key in everywhere:
                raise UsageError(f"{place}: `ampdoctor {command}` has no setting {key}")
            raise _unknown_key(place, key, known)
        read[key] = _checked(config, place, key, value, known[key]), place
    return read


def _checked(config: Config, place: str, key: str, value: Any, option: Any) -> Any:
    wanted = type_of(option)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise _wrong_value(place, EXPECTED[wanted], value)
    for text in value if isinstance(value, list) else [value] if isinstance(value, str) else []:
        if not (isinstance(text, str) and text.isprintable()):
            raise UsageError(f"{place}: expected {EXPECTED[wanted]} without control characters")
    return _placed(config, place, key, value)


def _unknown_key(place: str, key: str, known: Collection[str]) -> UsageError:
    near = get_close_matches(key, sorted(known), n=1)
    return UsageError(f"{place}: there is no such key{f'; did you mean {near[0]}?' if near else ''}")


def _wrong_value(place: str, expected: str, value: Any) -> UsageError:
    return UsageError(f"{place}: expected {expected}, not {type(value).__name__}")


# -- paths in a configuration file are relative to its folder --
#
# A file that was found may come from a stranger, inside a repository. So it may only write into its own folder, not to
# hidden files there (`.git`, `.github`, `.env` belong to other tools), and name code only by a path in that folder: a
# module name, such as `os`, is whatever Python finds. Reading executes nothing. What --config names may do all of this.

USES: Mapping[str, str] = {
    **dict.fromkeys(("health", "output", "save", "write-baseline"), "writes"),
    **dict.fromkeys(("batches", "loss", "model"), "runs code"),  # FILE.py:NAME or a module
    **dict.fromkeys(("against", "baseline", "checkpoint", "checkpoints", "config", "profile"), "reads"),
    "report": "writes forms",  # FORM=FILE
    "export": "exports",  # KIND=TARGET
    "app-dir": "runs code from",
}
"""The use of each option's value that names a place."""


def _placed(config: Config, place: str, key: str, value: Any) -> Any:
    """Return a setting's value with its paths relative to the working directory; `place` names the key in errors.

    Raises UsageError where a found file names something out of its reach.
    """
    use = USES.get(key)
    if use == "writes forms":
        pairs = (text.partition("=") for text in value)
        return [f"{form}{equals}{_one(config, place, path, writes=True)}" for form, equals, path in pairs]
    if use == "exports":
        return [_exported(config, place, text) for text in value]
    if use == "runs code":
        return _code(config, place, value, alone=key == "model")
    return _one(config, place, value, writes=use == "writes", runs=use == "runs code from") if use else value


def _exported(config: Config, place: str, text: str) -> str:
    """Return an export's target relative to the working directory. A found file may not name a server or account."""
    from ampdoctor.health.sinks.export import KINDS  # few runs need it

    name, equals, target = text.partition("=")
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None or not target.strip():
        return text  # the option itself reports it
    if kind.is_path and "://" not in target and not target.startswith(":"):
        return f"{name}{equals}{_one(config, place, os.path.expanduser(target), writes=True)}"  # noqa: PTH111 - a text
    if config.found:
        raise UsageError(f"{place}: {text} sends the run's numbers to where it says, and {_because(config)}")
    return text


def _code(config: Config, place: str, value: str, *, alone: bool) -> str:
    path, colon, name = value.rpartition(":")
    if alone and value.endswith(".py"):
        return _one(config, place, value, runs=True)
    if path.endswith(".py"):
        return f"{_one(config, place, path, runs=True)}{colon}{name}"
    if config.found and value.strip():
        said = f"{value} is a module, wherever Python finds it, and {_because(config)}"
        raise UsageError(f"{place}: {said}: name its file (FILE.py:NAME)")
    return value


def _one(config: Config, place: str, path: str, *, writes: bool = False, runs: bool = False) -> str:
    if not path.strip() or (writes and path in NAMES_OF_STDOUT):  # empty: the option itself reports it
        return path
    joined = os.path.normpath(Path(config.file or "").parent / path)
    if config.found and (writes or runs):
        folder, target = Path(os.path.realpath(Path(config.file or "").parent)), Path(os.path.realpath(joined))
        if not target.is_relative_to(folder):
            raise UsageError(f"{place}: {joined} lies outside the file's own folder, and {_because(config)}")
        if writes and any(part.startswith(".") for part in target.relative_to(folder).parts):
            raise UsageError(f"{place}: {joined} is hidden, or in a hidden folder, and {_because(config)}")
    return f".{os.sep}{joined}" if joined.startswith("~") else joined  # a folder named `~...`, not a home folder


def _because(config: Config) -> str:
    return f"{config.file} was found, not named with --config"


# -- `[tool.ampdoctor.rules]` and `[[tool.ampdoctor.ignore]]` --

_PATTERNS = ("tensor", "module", "file")
_IGNORE_KEYS = ("rule", *_PATTERNS, "reason", "expires")


def _rules(config: Config, table: Any) -> Mapping[str, RuleSettings]:
    """Return the settings of rules, by code. An unknown or repeated rule and a wrong value raise UsageError."""
    if not isinstance(table, dict):
        raise _wrong_value(config.place(RULES_KEY), "a table", table)
    rules: dict[str, RuleSettings] = {}
    for name, settings in table.items():
        place = config.place(f"{RULES_KEY}.{name}")
        with _at(place):
            code = find_rule(name).code
        if code in rules:
            raise UsageError(f"{place}: {code} is there twice, under two names")
        if not isinstance(settings, dict):
            raise _wrong_value(place, "a table", settings)
        severity, known = settings.get("severity"), get_args(SeverityOrIgnore)
        if severity is not None and severity not in known:
            raise UsageError(f"{place}.severity: expected one of {', '.join(known)}")
        thresholds = {key: value for key, value in settings.items() if key != "severity"}
        for key, value in thresholds.items():
            with _at(f"{place}.{key}"):
                check_threshold(code, key, value)
        rules[code] = RuleSettings(severity=severity, thresholds=thresholds)
    return rules


def _ignores(config: Config, tables: Any) -> tuple[Ignore, ...]:
    """Return the ignores, in the file's order. A missing reason, an unknown key or a wrong value raises UsageError."""
    key = f"{config.prefix}{IGNORE_KEY}"
    if not isinstance(tables, list):
        raise UsageError(f"{config.place(IGNORE_KEY)}: expected tables, [[{key}]], each of one ignore")
    lines = config.ignore_lines if len(config.ignore_lines) == len(tables) else (1,) * len(tables)
    return tuple(
        _ignore(config.place(f"{IGNORE_KEY}[{index}]"), table, Source(config.file or "", lines[index]))
        for index, table in enumerate(tables)
    )


def _ignore(place: str, table: Any, written: Source) -> Ignore:
    if not isinstance(table, dict):
        raise _wrong_value(place, "a table", table)
    for key, value in table.items():
        if key not in _IGNORE_KEYS:
            raise _unknown_key(f"{place}.{key}", key, _IGNORE_KEYS)
        if key != "expires" and not isinstance(value, str):
            raise _wrong_value(f"{place}.{key}", "a string", value)
    for key in ("rule", "reason"):
        if not table.get(key, "").strip():
            raise UsageError(f"{place}: {key} is missing; an ignore says which rule, and why")
    with _at(f"{place}.rule"):
        code = find_rule(table["rule"]).code
    if code in (UNUSED_IGNORE.code, EXPIRED_IGNORE.code):
        raise UsageError(f'{place}.rule: {code} is about ignores; `rules.{code}.severity = "ignore"` switches it off')
    expires = table.get("expires")
    if expires is not None and (not isinstance(expires, date) or isinstance(expires, datetime)):
        raise UsageError(f"{place}.expires: expected a date without quotes, such as 2027-01-31")
    patterns = {key: table.get(key) for key in _PATTERNS}
    return Ignore(rule=code, reason=table["reason"], expires=expires, written=written, **patterns)


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
