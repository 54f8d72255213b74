"""docs/cli.md is the command line as a page: every command, argument and option, with default and variable.

After a change that is meant: `PYTHONPATH=. python tests/test_cli_page.py` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from ampdoctor.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
HEAD = """# Commands

Every command with its arguments and options, as `ampdoctor COMMAND --help` lists them. An option may also be set by the
environment variable beside it (`AMPDOCTOR_SCAN_FAIL_ON` for one command alone), or by its name without the dashes in
`[tool.ampdoctor]` of `pyproject.toml` or in `ampdoctor.toml`; the command line goes before the environment, and that
before the file. `ampdoctor --install-completion` makes the shell complete commands, options and their choices (bash,
zsh, fish).
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


def rows(context, kind):
    """Name with its value, help, default and variable of each argument or option."""
    found = []
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if parameter.param_type_name != kind or record is None:
            continue
        named, said = record
        default = DEFAULT.search(said)
        shown = default["default"] if default is not None else None
        if kind == "argument":
            named = parameter.metavar
        variables = list(parameter.envvar or ())  # of this command, and of all
        found.append((named, " ".join(DEFAULT.sub("", said).split()), shown or "", variables[-1:]))
    return found


def cell(text):
    return text.replace("|", "\\|")


def table(context, kind):
    lines = []
    listed = rows(context, kind)
    if not listed:
        return ""
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


def rendered():
    parts = [HEAD]
    for name, context in contexts().items():
        parts.append(f"## ampdoctor {name}\n\n{' '.join(context.command.help.split())}\n")
        parts.append(f"```text\n{usage(context)}\n```\n")
        parts += [table(context, kind) for kind in ("argument", "option") if rows(context, kind)]
    return "\n".join(parts)


def test_the_page_is_the_command_line():
    assert PAGE.read_text(encoding="utf-8") == rendered()


def options_of_the_page():
    sections = PAGE.read_text(encoding="utf-8").split("\n## ampdoctor ")[1:]
    return {
        section.partition("\n")[0]: set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", "".join(
            line.split("|")[1] for line in section.splitlines() if line.startswith("| `-")
        )))
        for section in sections
    }  # fmt: skip


def test_every_option_of_the_readme_is_on_the_page():
    known = set().union(*options_of_the_page().values()) | {"--version", "--install-completion", "--show-completion"}
    text = re.sub(r" -- [^`]*", "", (ROOT / "README.md").read_text(encoding="utf-8"))  # a script's own arguments
    text = re.sub(r"(`ampdoctor run [^`]*?\.py)[^`]*", r"\1", text)  # what follows it is the script's as well
    named = set(re.findall(r"`ampdoctor [^`]*?(--[a-z][a-z0-9-]+)", text))
    assert named
    assert named <= known


def test_a_default_that_the_help_tells_in_words_is_one_and_the_bounds_are_not():
    options = {row[0].split()[0]: row for row in rows(contexts()["recommend"], "option")}
    assert options["--steps"][1:3] == (
        "Optimizer steps to replay, at most as there are batches. [x>=1]",
        "8 for bisect-nan, else 50",
    )


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
