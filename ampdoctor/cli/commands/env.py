"""`ampdoctor env`."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer

from ampdoctor.cli.options.options import ListFormat
from ampdoctor.cli.process.action import Action
from ampdoctor.cli.process.exit_code import Outcome
from ampdoctor.cli.process.streams import report_stream, write_stdout
from ampdoctor.errors import EXIT_OK
from ampdoctor.evidence.software import installed, machine, packages, variables
from ampdoctor.package import version


def env(form: Annotated[ListFormat, typer.Option("--format", help="Form of the list.")] = "human") -> Action:
    """List what to paste into a bug report.

    Versions, devices, and the settings that change numbers; nothing else of the environment is shown.
    """

    def action() -> Outcome:
        facts = {**_software(), **_torch(), **variables()}
        if form == "json":
            from ampdoctor.reports.json_report import strict_json

            write_stdout(strict_json(facts))
        else:
            from ampdoctor.reports.escape import sanitise

            write_stdout("".join(f"{name}: {sanitise(_shown(fact))}\n" for name, fact in facts.items()))
        return Outcome(EXIT_OK)

    return action


def versions() -> str:
    """Return one line with the versions of the tool, torch and Python, without importing torch."""
    torch = installed("torch") or "not installed"
    return f"ampdoctor {version()} (torch {torch}, Python {platform.python_version()})"


def _software() -> dict[str, Any]:
    return {**machine(), "stdout_encoding": getattr(report_stream(), "encoding", None), **packages()}


def _torch() -> dict[str, Any]:
    try:
        import torch  # noqa: F401 - alone, and first: one that cannot be loaded is what this page is for
    except Exception as error:  # noqa: BLE001
        return {"torch_import": f"{type(error).__name__}: {error}"}
    from ampdoctor.precision.hardware import device_facts, torch_facts

    return {"torch_import": "ok", **torch_facts(), **device_facts()}


def _shown(fact: Any) -> str:
    if fact is None:
        return "none"
    return "; ".join(fact) or "none" if isinstance(fact, list) else str(fact)
