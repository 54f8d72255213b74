"""The Typer application: which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.commands.bisect_nan import bisect_nan
from ampdoctor.cli.commands.env import env, versions
from ampdoctor.cli.commands.health import health
from ampdoctor.cli.commands.merge import merge
from ampdoctor.cli.commands.plan import plan
from ampdoctor.cli.commands.profile import profile
from ampdoctor.cli.commands.recommend import recommend
from ampdoctor.cli.commands.rule import rule
from ampdoctor.cli.commands.run import run
from ampdoctor.cli.commands.scan import scan
from ampdoctor.cli.process.streams import write_stdout
from ampdoctor.cli.settings.configured import ConfiguredCommand, configured
from ampdoctor.cli.settings.script_arguments import ReplayCommand

_EPILOG = "Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 anything else that went wrong, 130 Ctrl-C."

_SETTINGS = (
    "Settings: an option may also stand in [tool.ampdoctor] of pyproject.toml or in ampdoctor.toml (fail-on = "
    '"warning"), or in the environment (AMPDOCTOR_FAIL_ON=warning).'
)

app = typer.Typer(
    name="ampdoctor",
    epilog=_EPILOG,
    rich_markup_mode=None,  # plain help: half the start-up time, and the same text everywhere
    pretty_exceptions_enable=False,  # main() alone says how an error looks
)


def _version(asked: bool) -> None:
    if asked:
        write_stdout(versions() + "\n")
        raise typer.Exit


@app.callback()
def ampdoctor(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Diagnose mixed-precision training: what broke, why, what to change, and the proof."""


_ARGUMENTS_ARE_THE_SCRIPTS = {"allow_interspersed_args": False}
"""Whatever stands behind the script, also what looks like an option of ours."""

app.command(
    "run", cls=ConfiguredCommand, epilog=f"{_SETTINGS}\n\n{_EPILOG}", context_settings=_ARGUMENTS_ARE_THE_SCRIPTS
)(configured(run))
for _name, _command, _kind in (
    ("scan", scan, ConfiguredCommand),
    ("health", health, ConfiguredCommand),
    ("bisect-nan", bisect_nan, ReplayCommand),
    ("profile", profile, ReplayCommand),
    ("recommend", recommend, ReplayCommand),
    ("plan", plan, ConfiguredCommand),
    ("merge", merge, ConfiguredCommand),
):
    app.command(_name, cls=_kind, epilog=f"{_SETTINGS}\n\n{_EPILOG}")(configured(_command))
for _name, _command in (("rule", rule), ("env", env)):
    app.command(_name, epilog=_EPILOG)(_command)
