"""A command whose options a configuration file and the environment can set as well.

The command line overrides the environment, which overrides the configuration file, which overrides the default. Typer's
parser handles all but the file, whose values are Typer's default map.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from ampdoctor.cli.config import Config, load_config, read_config, settings_of
from ampdoctor.cli.options import refuse_empty
from ampdoctor.cli.process import write_stdout
from ampdoctor.cli.run_command import Action, Outcome
from ampdoctor.cli.suggest import said_of_the_value
from ampdoctor.errors import EXIT_OK, UsageError
from ampdoctor.evidence.thresholds import Moves
from ampdoctor.gates.findings import Ignore
from ampdoctor.reports.escape import sanitise

KNOBS = "Knobs (--threshold NAME=VALUE, or NAME in the configuration)"
_FLAG, _VARIABLE, _FILE = "COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP"  # Typer's names for the source of a value


def on_the_command_line(context: typer.Context) -> dict[str, str]:
    """Return the parameters that are on the command line itself, each with what sets it there."""
    command: Any = context.command
    typed = {option.name: command.typed(key) for key, option in command.settings.items()}
    return {name: typed[name] for name in typed if _source(context, name) == _FLAG}


def moved_in_the_file(context: typer.Context) -> Moves:
    """Return the thresholds that the configuration file sets, by code and name."""
    config: Config = context.obj
    return {code: rule.thresholds for code, rule in config.rules.items()}


def variables(command: str, key: str) -> list[str]:
    """Return the environment variables that set an option of a command; the first takes precedence."""
    name = key.upper().replace("-", "_")
    return [f"AMPDOCTOR_{command.upper().replace('-', '_')}_{name}", f"AMPDOCTOR_{name}"]


class ConfiguredCommand(TyperCommand):
    """A command with settings; `obj` of its context is its configuration.

    A hidden option is a knob, which few users ever move: `--threshold NAME=VALUE` sets it, and not an option.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.settings = settings_of(self.params)
        self.knobs = {key: option for key, option in self.settings.items() if option.hidden}
        for key, option in self.settings.items():
            option.envvar = variables(self.name or "", key)
            option.show_envvar = False  # the end of the help explains how their names are made

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the command's own options, its knobs, and last what every command has."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], KNOBS: []}
        one: Any
        for one in self.get_params(ctx):
            usual = "Arguments" if one.param_type_name == "argument" else "Options"
            record = one.get_help_record(ctx)
            if record is not None:
                panels.setdefault(one.rich_help_panel or usual, []).append(record)
        panels[KNOBS] = [(f"{key}={_plain(one.default)}", one.help) for key, one in self.knobs.items()]
        *own, shared = panels
        for panel in (*(name for name in own if panels[name]), shared):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, the environment and the file; errors name the source of the value."""
        if ctx.resilient_parsing:  # completion, which must not fail because of a file
            return super().parse_args(ctx, args)
        given: dict[str, Any] = self.make_parser(ctx).parse_args(args=list(args))[0]
        if given.get("help") is not True:
            ctx.obj = config = self._config(ctx, given)
            ctx.default_map = {self.settings[key].name: value for key, value in config.values.items()}
            if given.get("show_config") is True and not self._names_target(given):
                args = [*args, "."]  # any target will do
        try:
            rest = super().parse_args(ctx, args)
            self._turn_knobs(ctx)
        except typer.BadParameter as error:
            origin = None if error.param is None else self._origin(ctx, str(error.param.name))
            if origin is None:
                raise
            raise UsageError(f"{origin}: {said_of_the_value(error)}") from None
        return rest

    def invoke(self, ctx: Any) -> Action:
        """Return the command's action, with the configuration's decisions."""
        if ctx.params["show_config"]:
            return functools.partial(self._show_config, ctx)
        return functools.partial(super().invoke(ctx), command=self.name, config=ctx.obj)

    def typed(self, key: str) -> str:
        """Return what sets an option on the command line."""
        return f"--threshold {key}" if key in self.knobs else f"--{key}"

    def _config(self, ctx: Any, given: Mapping[str, Any]) -> Config:
        """Return the configuration, as `--config` and `--isolated` choose it."""
        named, isolated = given.get("config"), given.get("isolated") is True
        named = named if isinstance(named, str) else None  # Click has a marker for what is not given
        refuse_empty("--config", named)
        if isolated and named is not None:
            raise UsageError("--isolated reads no configuration file, and --config names one: give one of the two")
        commands: Mapping[str, Any] = getattr(getattr(ctx.parent, "command", None), "commands", {self.name: self})
        settings = {name: one.settings for name, one in commands.items() if isinstance(one, ConfiguredCommand)}
        return Config() if isolated else read_config(load_config(named), self.name or "", settings)

    def _names_target(self, given: Mapping[str, Any]) -> bool:
        arguments = (given.get(str(one.name)) for one in self.params if one.param_type_name == "argument")
        return any(isinstance(one, str | list | tuple) and one for one in arguments)

    def _turn_knobs(self, ctx: Any) -> None:
        """Set the knobs that `--threshold` names; raises UsageError for an unknown one, or one that is an option."""
        for key, knob in self.knobs.items():
            if _source(ctx, knob.name) == _FLAG:
                raise UsageError(f"--{key} is a knob: --threshold {key}=VALUE, or {key} in the configuration file")
        moved: dict[str, str] = {}
        of_rules = []
        for pair in ctx.params.get("threshold", ()):
            key, text = self._pair(pair)
            if key in moved:
                raise UsageError(f"--threshold {key}: given twice")
            if key in self.knobs:
                moved[key] = text
            else:
                of_rules.append(pair)
        for key, text in moved.items():
            try:
                ctx.params[self.knobs[key].name] = self.knobs[key].process_value(ctx, text)
                ctx.set_parameter_source(self.knobs[key].name, ctx.get_parameter_source("threshold"))
            except typer.BadParameter as error:
                raise UsageError(f"--threshold {key}={text}: {said_of_the_value(error)}") from None
        if "threshold" in ctx.params:
            ctx.params["threshold"] = of_rules

    def _pair(self, pair: str) -> tuple[str, str]:
        """Return name and value of a `--threshold`; may raise UsageError."""
        key, equals, text = pair.partition("=")
        if not equals or not (key in self.knobs or "." in key):
            known = ", ".join(f"{name}={_plain(knob.default)}" for name, knob in self.knobs.items())
            known += " and " if known else ""
            raise UsageError(
                f"--threshold {pair}: the form is NAME=VALUE, and the names are {known}those of the rules "
                "(AMP107.saturated=0.25; `ampdoctor rule CODE` shows a rule's, with their defaults)"
            )
        if "_" in text or not text.isascii():  # Python would read 1_0 and other scripts' digits
            raise UsageError(f"--threshold {pair}: {text!r} is no number")
        return key, text

    def _origin(self, ctx: Any, name: str) -> str | None:
        """Return where a parameter's value came from; None: from the command line or the tool's default."""
        key = next((key for key, option in self.settings.items() if option.name == name), "")
        source = _source(ctx, name)
        if source == _VARIABLE:
            return next((one for one in variables(self.name or "", key) if os.environ.get(one)), None)
        return ctx.obj.places.get(key) if source == _FILE else None

    # -- `--show-config` --

    def _show_config(self, ctx: Any) -> Outcome:
        """Show every setting with its value and origin, as JSON or as text."""
        config: Config = ctx.obj
        settings = {}
        for key, option in self.settings.items():
            usual = self.typed(key) if _source(ctx, option.name) == _FLAG else "default"
            settings[key] = {"value": ctx.params[option.name], "from": self._origin(ctx, option.name) or usual}
        if ctx.params["format"] == "json":
            from ampdoctor.reports.json_report import strict_json

            ignores = [_ignore(config, ignore) for ignore in config.ignores]
            facts = {"command": self.name, "config": config.file, "settings": settings}
            write_stdout(strict_json({**facts, "rules": config.rules, "ignore": ignores}))
            return Outcome(EXIT_OK)
        rows = [(f"{key} = {_shown(one['value'])}", one["from"]) for key, one in settings.items()]
        rows += _of_rules(config)
        width = min(max(len(row[0]) for row in rows), 48)
        lines = [f"{sanitise(said):{width}}  {sanitise(origin)}" for said, origin in rows]
        write_stdout("\n".join([f"configuration file: {sanitise(config.file or 'none')}", *lines]) + "\n")
        return Outcome(EXIT_OK)


def _source(ctx: Any, name: str) -> str | None:
    return getattr(ctx.get_parameter_source(name), "name", None)


def _of_rules(config: Config) -> Iterator[tuple[str, str]]:
    for code, rule in config.rules.items():
        for key, number in {"severity": rule.severity, **rule.thresholds}.items():
            if number is not None:
                yield f"rules.{code}.{key} = {_shown(number)}", config.place(f"rules.{code}.{key}")
    for ignore in config.ignores:
        entry = _ignore(config, ignore)
        told = ", ".join(f"{key} {v}" for key, v in entry.items() if v is not None and key not in ("written", "reason"))
        yield f"ignore {told}: {entry['reason']}", entry["written"]


def _ignore(config: Config, ignore: Ignore) -> dict[str, Any]:
    line = f":{ignore.written.line}" if ignore.written is not None else ""
    said = {name: getattr(ignore, name) for name in ("rule", "tensor", "module", "file")}
    expires = None if ignore.expires is None else ignore.expires.isoformat()
    return {**said, "expires": expires, "reason": ignore.reason, "written": f"{config.file}{line}"}


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


# -- `--`: what follows it are the arguments of the user's script --

_KEY = "ampdoctor.script_arguments"


class ReplayCommand(ConfiguredCommand):
    """A command whose target may be a script with arguments of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before `--` where they name the target; else `--` only ends the options, as usual."""
        if "--" in args and not ctx.resilient_parsing:
            at = args.index("--")
            if self._names_target(self.make_parser(ctx).parse_args(args=args[:at])[0]):
                ctx.meta[_KEY] = tuple(args[at + 1 :])
                args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's pieces."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def script_arguments(context: typer.Context) -> tuple[str, ...]:
    """Return the arguments of the user's script."""
    return tuple(context.meta.get(_KEY, ()))
