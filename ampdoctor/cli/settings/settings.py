"""Which options are settings: what a configuration file and the environment may say instead of the command line.

All of them are read off the commands' own signatures, so that there is no second list to keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typer.models import OptionInfo

from ampdoctor.cli.options.one_run import ONE_RUN

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
"""Options of one run alone. As a standing setting --write-baseline would make every run its own baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option, as a configuration file knows it.

    Attributes:
        parameter: Python's name of it.
        key: The long option without its dashes.
        kind: What its value is.
        choices: The values that there are, where they are counted.
    """

    parameter: str
    key: str
    kind: Kind
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """The long option."""
        return f"--{self.key}"

    def variables(self, command: str) -> list[str]:
        """Return the environment variables that set it for a command, the one that holds before the other first."""
        name = self.key.upper().replace("-", "_")
        return [f"AMPDOCTOR_{command.upper().replace('-', '_')}_{name}", f"AMPDOCTOR_{name}"]


def settings_of(function: Callable[..., Any]) -> tuple[Setting, ...]:
    """Return the settings of a command, in the order of its options.

    Args:
        function: The command, with `Annotated[type, typer.Option("--name", ...)]` parameters.
    """
    return tuple(one for one, of_one_run in options_of(function) if not of_one_run)


def options_of(function: Callable[..., Any]) -> Iterator[tuple[Setting, bool]]:
    """Yield every option of a command, and whether it is about one run, so that it is no setting.

    Args:
        function: As in `settings_of`.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        annotated, *metadata = get_args(parameter.annotation) or (None,)
        option = next((item for item in metadata if isinstance(item, OptionInfo)), None)
        if option is None:
            continue
        first = option.default  # in an annotation the first name stands where defaults do
        names = map(str, (first, *(option.param_decls or ())))
        key = next(name.removeprefix("--") for name in names if name.startswith("--"))
        kind, choices = _kind(annotated)
        yield Setting(parameter=name, key=key, kind=kind, choices=choices), key in NO_SETTINGS or ONE_RUN in metadata


def _kind(annotated: Any) -> tuple[Kind, tuple[str, ...]]:
    if get_origin(annotated) in (Union, UnionType):
        (annotated,) = (part for part in get_args(annotated) if part is not NoneType)
    if get_origin(annotated) is list:
        return "list", ()
    if get_origin(annotated) is Literal:
        return "text", tuple(map(str, get_args(annotated)))
    return _KINDS[annotated], ()
