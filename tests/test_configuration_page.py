"""docs/configuration.md has every setting. After a change: `PYTHONPATH=. python tests/test_configuration_page.py`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer

from ampdoctor.cli.config import EXPECTED, Config, read_config, type_of
from ampdoctor.cli.configured_command import ConfiguredCommand
from ampdoctor.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
TABLE = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- /settings -->)", re.DOTALL)
KINDS = {**EXPECTED, str: "text"}


def commands():
    group = typer.main.get_command(app)
    return {name: command for name, command in group.commands.items() if isinstance(command, ConfiguredCommand)}


def rendered():
    """The table of settings: key, value, default and commands."""
    rows = {}
    for name, command in commands().items():
        defaults = {parameter.name: parameter.default for parameter in command.params}
        for key, one in command.settings.items():
            value = ", ".join(one.type_descriptor.choices or ()) or KINDS[type_of(one)]
            row = rows.setdefault((key, value, shown(defaults[one.name], type_of(one))), [])
            row.append(name)
    everywhere = list(commands())
    lines = ["| key | value | default | commands | variable |", "| --- | --- | --- | --- | --- |"]
    for (key, value, default), names in sorted(rows.items()):
        variable = f"`AMPDOCTOR_{key.upper().replace('-', '_')}`"
        which = "all" if names == everywhere else ", ".join(names)
        lines.append(f"| `{key}` | {value} | {default} | {which} | {variable} |")
    return "\n".join(lines) + "\n"


def shown(default, kind):
    if default is None:
        return "none"
    return {bool: "false", list: "empty"}.get(kind) or f"`{default}`"


def test_the_table_is_the_settings():
    assert TABLE.search(PAGE.read_text(encoding="utf-8")).group(0) == rendered()


@pytest.mark.parametrize("command", commands())
def test_the_example_is_a_configuration_for_every_command(command):
    example = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    table = tomllib.loads(example)["tool"]["ampdoctor"]
    file = Config(file="pyproject.toml", found=True, prefix="tool.ampdoctor.", table=table)
    config = read_config(file, command, {name: c.settings for name, c in commands().items()})
    assert config.values["fail-on"] == "warning"
    assert ("baseline" in config.values) == (command == "scan")
    assert config.rules["AMP107"].severity == "error"
    assert config.ignores[0].rule == "AMP104"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: rendered(), text), encoding="utf-8")
