"""docs/cli.md is the command line as a page: every command, argument and option, with default and variable.

After a change that is meant: `PYTHONPATH=. python tests/test_cli_page.py` writes it anew.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from ampdoctor.cli.configured_command import ConfiguredCommand, _plain
from ampdoctor.cli.main import app, main
from ampdoctor.cli.options import REPORT_AND_CI

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
HEAD = """# Commands

Every command with its arguments and options, as `ampdoctor COMMAND -h` lists them. Those that every command has stand
once, [at the end](#report-and-ci-the-same-for-every-command). An option may also be set by the environment variable
beside it (`AMPDOCTOR_SCAN_FAIL_ON` for one command alone), or by its name without the dashes in `[tool.ampdoctor]` of
`pyproject.toml` or in `ampdoctor.toml`; the command line goes before the environment, and that before the file. A knob
is set in the same ways, and on the command line by `--threshold KNOB=VALUE`: few users ever need one.
`ampdoctor --install-completion` makes the shell complete commands, options and their choices (bash, zsh, fish).
"""
DEFAULT = re.compile(r"\s*\[(?:default: (?P<default>.*?)|required)(?:; [^\]]*)?\](?=\.?(?:$|\s*\[))", re.DOTALL)


def root():
    return get_command(app)


def contexts():
    """The context of each command, by name."""
    top = root()
    context = top.make_context("ampdoctor", [], resilient_parsing=True)
    return {name: type(context)(command, info_name=name, parent=context) for name, command in top.commands.items()}


def usage(context):
    return " ".join(context.get_usage().removeprefix("Usage: ").split())


def rows(context, kind, *, panel=None):
    """Name with its value, help, default and variable of each argument, option of a panel of the help, or knob."""
    found = []
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if kind == "knob" and getattr(parameter, "hidden", False):
            default = _plain(parameter.default)
            record, shown = (parameter.opts[0].removeprefix("--"), parameter.help), default
        elif parameter.param_type_name != kind or record is None or parameter.rich_help_panel != panel:
            continue
        else:
            default = DEFAULT.search(record[1])
            shown = default["default"] if default is not None else None
        named = parameter.metavar if kind == "argument" else record[0]
        variables = list(parameter.envvar or ())  # of this command, and of all
        found.append((named, " ".join(DEFAULT.sub("", record[1]).split()), shown or "", variables[-1:]))
    return found


def cell(text):
    return text.replace("|", "\\|")


def table(kind, listed):
    lines = []
    variables = any(row[3] for row in listed)
    heads = [kind, "what it does", "default", *(["variable"] if variables else [])]
    lines.append("| " + " | ".join(heads) + " |")
    lines.append("| " + " | ".join("---" for _ in heads) + " |")
    for named, said, default, envvars in listed:
        cells = [f"`{cell(named)}`", cell(said).replace("<", "&lt;"), f"`{cell(default)}`" if default else ""]
        if variables:
            cells.append(", ".join(f"`{name}`" for name in envvars))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def examples(context):
    return [line.strip() for line in context.command.help.partition("Examples:\n")[2].splitlines()]


def rendered():
    parts = [HEAD]
    for name, context in contexts().items():
        said = context.command.help.partition("\n\n\b\n")[0]
        parts.append(f"## ampdoctor {name}\n\n{' '.join(said.split())}\n")
        parts.append("```text\n" + "\n".join([usage(context), "", *examples(context)]) + "\n```\n")
        kinds = {kind: rows(context, kind) for kind in ("argument", "option", "knob")}
        parts += [table(kind, listed) for kind, listed in kinds.items() if listed]
    shared = rows(contexts()["merge"], "option", panel=REPORT_AND_CI)
    return "\n".join([*parts, f"## {REPORT_AND_CI}\n", table("option", shared)])


def test_the_page_is_the_command_line():
    assert PAGE.read_text(encoding="utf-8") == rendered()


@pytest.mark.parametrize("name", contexts())
def test_each_command_has_three_examples_that_can_be_typed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    context = contexts()[name]
    shown = examples(context)
    assert len(shown) == 3
    for example in shown:
        program, command, *arguments = shlex.split(example.partition(" > ")[0])
        assert (program, command) == ("ampdoctor", name)
        asked = ["--show-config"] if isinstance(context.command, ConfiguredCommand) else []
        assert main([command, *asked, *arguments]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", contexts())
def test_help_is_short_and_has_the_commands_own_options_first(name, capsys):
    assert main([name, "-h"]) == 0
    shown = capsys.readouterr().out
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == shown
    if isinstance(contexts()[name].command, ConfiguredCommand):
        own, _, shared = shown.partition(f"\n{REPORT_AND_CI}:\n")
        assert shared.count("jsonl") == shown.count("jsonl") == 1 or name == "merge"
        assert "--fail-on" in shared
        assert "--help" in own


def test_a_default_that_the_help_tells_in_words_is_one_and_the_bounds_are_not():
    options = {row[0].split()[0]: row for row in rows(contexts()["recommend"], "option")}
    assert options["--steps"][1:3] == (
        "Optimizer steps to replay, at most as there are batches. [x>=1]",
        "8 for bisect-nan, else 50",
    )


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
