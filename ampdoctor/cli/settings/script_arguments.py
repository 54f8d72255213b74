"""What follows `--` on the command line of a command that runs the user's code: the arguments of their script."""

from __future__ import annotations

from typing import Any

import typer

from ampdoctor.cli.settings.configured import ConfiguredCommand

_KEY = "ampdoctor.script_arguments"


class ReplayCommand(ConfiguredCommand):
    """A command whose target may be a script, with arguments of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before `--`, where that names the target; else `--` only ends the options, as ever."""
        head, after = _split(args)
        if after and not ctx.resilient_parsing and self._names_target(ctx, head):
            ctx.meta[_KEY] = tuple(after)
            args = head
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's pieces."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]

    def _names_target(self, ctx: Any, args: list[str]) -> bool:
        try:
            parsed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        except Exception:  # noqa: BLE001 - what is wrong with it is said where it is parsed in earnest
            return True
        arguments: list[Any] = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        return any(isinstance(parsed.get(one.name), str | list | tuple) and parsed[one.name] for one in arguments)


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in args:
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def script_arguments(context: typer.Context) -> tuple[str, ...]:
    """Return the arguments of the user's script."""
    given: tuple[str, ...] = context.meta.get(_KEY, ())
    return given
