"""A command whose options a configuration file and the environment can set as well.

The command line overrides the environment, which overrides the configuration file, which overrides the default. Typer's
parser handles all but the file; the file is Typer's default map, read when the first option needs it, so after
`--help`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ampdoctor.cli.config import Config, ConfigOption, Default, load_config, read_config, settings_of
from ampdoctor.cli.options import refuse_empty
from ampdoctor.cli.process import write_stdout
from ampdoctor.cli.run_command import Action, Outcome, ReportCommand
from ampdoctor.cli.suggest import said_of_the_value
from ampdoctor.errors import EXIT_OK, UsageError
from ampdoctor.evidence.thresholds import Moves
from ampdoctor.gates.findings import Ignore
from ampdoctor.reports.escape import sanitise

R = TypeVar("R")

_OF_ONE_RUN = {
    "config": Annotated[
        str | None,
        typer.Option(
            "--config",
            is_eager=True,
            metavar="FILE",
            help="Settings from here [default: the nearest ampdoctor.toml or pyproject.toml].",
        ),
    ],
    "isolated": Annotated[bool, typer.Option("--isolated", is_eager=True, help="Read no configuration file.")],
    "show_config": Annotated[
        bool,
        typer.Option(
            "--show-config", is_eager=True, help="Show every setting and where it comes from; examine nothing."
        ),
    ],
}
_FLAG, _VARIABLE, _FILE = "COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP"  # Typer's names for the source of a value


def configured(function: Callable[..., R]) -> Callable[..., R]:
    """Return the command with the options that choose its configuration; the command itself does not receive them."""
    defaults: dict[str, Any] = {"config": None, "isolated": False, "show_config": False}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in _OF_ONE_RUN.items()
    ]

    @functools.wraps(function)
    def command(**values: Any) -> R:
        return function(**{name: value for name, value in values.items() if name not in _OF_ONE_RUN})

    parameters = [*inspect.signature(function).parameters.values(), *added]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def on_the_command_line(context: typer.Context) -> frozenset[str]:
    """Return the parameters that are on the command line itself."""
    return frozenset(name for name in context.params if _source(context, name) == _FLAG)


def moved_in_the_file(context: typer.Context) -> Moves:
    """Return the thresholds that the configuration file sets, by code and name."""
    command: Any = context.command
    if not isinstance(command, ConfiguredCommand):
        return {}
    return {code: rule.thresholds for code, rule in command.config(context).rules.items()}


class ConfiguredCommand(TyperCommand):
    """A command with settings."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.settings = settings_of(self.callback) if self.callback is not None else ()
        for setting in self.settings:
            option: Any = next(parameter for parameter in self.params if parameter.name == setting.parameter)
            option.envvar = setting.variables(self.name or "")
            option.show_envvar = False  # the end of the help explains how their names are made

    def get_help(self, ctx: Any) -> str:
        """Return the help, with the tool's defaults and not a file's."""
        ctx.default_map = None
        return super().get_help(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, the environment and the file; errors name the source of the value."""
        if ctx.resilient_parsing:  # completion, which must not fail because of a file
            return super().parse_args(ctx, args)
        ctx.default_map = _Defaults(ctx, self)
        try:
            return self._parse(ctx, args)
        except typer.BadParameter as error:
            origin = None if error.param is None else self._origin(ctx, str(error.param.name))
            if origin is None:
                raise
            raise UsageError(f"{origin}: {said_of_the_value(error)}") from None

    def invoke(self, ctx: Any) -> Action:
        """Return the command's action, with the configuration's decisions."""
        if ctx.params["show_config"]:
            return show_config(self.name or "", self._effective(ctx), self.config(ctx), ctx.params["format"])
        action: Action = super().invoke(ctx)
        if isinstance(action, ReportCommand):
            action = replace(action, command=self.name or "", config=self.config(ctx))
        return action

    def _parse(self, ctx: Any, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            parameter: Any = error.param
            if parameter is None or parameter.param_type_name != "argument" or not ctx.params.get("show_config"):
                raise
        return super().parse_args(ctx, [*typed, "."])  # any target will do

    def config(self, ctx: Any) -> Config:
        """Return the configuration for this command."""
        defaults = ctx.default_map
        return defaults.config() if isinstance(defaults, _Defaults) else Config()

    def _origin(self, ctx: Any, name: str) -> str | None:
        """Return where a parameter's value came from; None: from the command line or the tool's default."""
        setting = next((setting for setting in self.settings if setting.parameter == name), None)
        source = _source(ctx, name)
        if setting is not None and source == _VARIABLE:
            given = (variable for variable in setting.variables(self.name or "") if os.environ.get(variable))
            return next(given, None)
        if setting is not None and source == _FILE:
            return self.config(ctx).defaults[setting.key].place
        return None

    def _effective(self, ctx: Any) -> list[tuple[str, Any, str]]:
        return [
            (
                setting.key,
                ctx.params[setting.parameter],
                self._origin(ctx, setting.parameter)
                or (setting.option if _source(ctx, setting.parameter) == _FLAG else "default"),
            )
            for setting in self.settings
        ]


class _Defaults:
    """Typer's default map: the configuration file, read at the first access."""

    def __init__(self, ctx: Any, command: ConfiguredCommand) -> None:
        self._ctx = ctx
        self._command = command
        self._keys = {setting.parameter: setting.key for setting in command.settings}
        self._config: Config | None = None

    def get(self, parameter: str) -> Any:
        """Return the file's value for a parameter; None: it has none."""
        default: Default | None = self.config().defaults.get(self._keys[parameter]) if parameter in self._keys else None
        return None if default is None else default.value

    def config(self) -> Config:
        """Return the configuration, as `--config` and `--isolated` choose it."""
        if self._config is not None:
            return self._config
        named, isolated = (self._ctx.params[name] for name in ("config", "isolated"))
        refuse_empty("--config", named)
        if isolated and named is not None:
            raise UsageError("--isolated reads no configuration file, and --config names one: give one of the two")
        file = None if isolated else load_config(named)
        self._config = Config()
        if file is not None:
            self._config = read_config(file, self._command.name or "", _all_settings(self._ctx))
        return self._config


def _all_settings(ctx: Any) -> Mapping[str, Sequence[ConfigOption]]:
    """Return the settings of every command: the whole file is checked, whichever runs."""
    group = getattr(ctx.parent, "command", None)
    commands = getattr(group, "commands", {ctx.command.name: ctx.command})
    return {name: command.settings for name, command in commands.items() if isinstance(command, ConfiguredCommand)}


def _source(ctx: Any, name: str) -> str | None:
    return getattr(ctx.get_parameter_source(name), "name", None)


# -- `--`: what follows it are the arguments of the user's script --

_KEY = "ampdoctor.script_arguments"


class ReplayCommand(ConfiguredCommand):
    """A command whose target may be a script with arguments of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before `--` where they name the target; else `--` only ends the options, as usual."""
        if "--" in args and not ctx.resilient_parsing:
            at = args.index("--")
            if self._names_target(ctx, args[:at]):
                ctx.meta[_KEY] = tuple(args[at + 1 :])
                args = args[:at]
        return super().parse_args(ctx, args)

    def _names_target(self, ctx: Any, args: list[str]) -> bool:
        try:
            parsed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        except Exception:  # noqa: BLE001 - the real parsing reports the error
            return True
        named = [parsed.get(one.name) for one in self.params if one.param_type_name == "argument"]
        return any(isinstance(one, str | list | tuple) and one for one in named)  # Click has a marker for the others

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's pieces."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def script_arguments(context: typer.Context) -> tuple[str, ...]:
    """Return the arguments of the user's script."""
    given: tuple[str, ...] = context.meta.get(_KEY, ())
    return given


# -- `--show-config` --


def show_config(command: str, settings: Sequence[tuple[str, Any, str]], config: Config, form: str) -> Action:
    """Return the action that shows `settings` (key, value and origin of each), as `form` "json" or as text."""

    def action() -> Outcome:
        write_stdout(_as_json(command, settings, config) if form == "json" else _as_text(settings, config))
        return Outcome(EXIT_OK)

    return action


def _as_json(command: str, settings: Sequence[tuple[str, Any, str]], config: Config) -> str:
    from ampdoctor.reports.json_report import strict_json

    return strict_json(
        {
            "command": command,
            "config": config.file,
            "settings": {key: {"value": value, "from": origin} for key, value, origin in settings},
            "rules": config.rules,
            "ignore": [_ignore(config, ignore) for ignore in config.ignores],
        }
    )


def _as_text(settings: Sequence[tuple[str, Any, str]], config: Config) -> str:
    rows = [(f"{key} = {_shown(value)}", origin) for key, value, origin in settings]
    for code, rule in config.rules.items():
        numbers = {"severity": rule.severity, **rule.thresholds}
        for key, number in numbers.items():
            name = f"rules.{code}.{key}"
            if number is not None:
                rows.append((f"{name} = {_shown(number)}", f"{config.file}: {config.prefix}{name}"))
    for ignore in config.ignores:
        entry = _ignore(config, ignore)
        told = ", ".join(f"{key} {v}" for key, v in entry.items() if v is not None and key not in ("written", "reason"))
        rows.append((f"ignore {told}: {entry['reason']}", entry["written"]))
    width = min(max(len(row[0]) for row in rows), 48)
    lines = [f"{sanitise(said):{width}}  {sanitise(origin)}" for said, origin in rows]
    return "\n".join([f"configuration file: {sanitise(config.file or 'none')}", *lines]) + "\n"


def _ignore(config: Config, ignore: Ignore) -> dict[str, Any]:
    line = f":{ignore.written.line}" if ignore.written is not None else ""
    return {
        "rule": ignore.rule,
        "tensor": ignore.tensor,
        "module": ignore.module,
        "file": ignore.file,
        "expires": None if ignore.expires is None else ignore.expires.isoformat(),
        "reason": ignore.reason,
        "written": f"{config.file}{line}",
    }


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
