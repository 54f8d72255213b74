"""`--show-config`: every setting of a command, and where it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ampdoctor.cli.process.action import Action
from ampdoctor.cli.process.exit_code import Outcome
from ampdoctor.cli.process.streams import note, write_stdout
from ampdoctor.cli.settings.config import Config
from ampdoctor.cli.suggesting.near import near_name
from ampdoctor.errors import EXIT_OK
from ampdoctor.reports.escape import sanitise

_PREFIX = "AMPDOCTOR_"


def show_config(
    command: str, settings: Sequence[tuple[str, Any, str]], config: Config, form: str, variables: Sequence[str]
) -> Action:
    """Return the action that shows them.

    Args:
        command: The command's name.
        settings: Key, value and origin of each.
        config: The configuration that was read.
        form: `json`, or anything else for people.
        variables: The environment variables that there are.
    """

    def action() -> Outcome:
        _note_strangers(variables)
        write_stdout(_as_json(command, settings, config) if form == "json" else _as_text(settings, config))
        return Outcome(EXIT_OK)

    return action


def _note_strangers(variables: Sequence[str]) -> None:
    """Say which variables look like settings and are none: a typing error there is silent anywhere else."""
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in variables:
            near = near_name(name.removeprefix(_PREFIX), [known.removeprefix(_PREFIX) for known in variables])
            hint = f"; did you mean {_PREFIX}{near}?" if near else ""
            note(f"ampdoctor: {name} is set, and no setting{hint}")


def _as_json(command: str, settings: Sequence[tuple[str, Any, str]], config: Config) -> str:
    from ampdoctor.reports.json_report import strict_json

    return strict_json(
        {
            "command": command,
            "config": config.file,
            "settings": {key: {"value": value, "from": origin} for key, value, origin in settings},
            "rules": config.rules,
            "ignore": [_ignore(config, index) for index in range(len(config.ignores))],
        }
    )


def _as_text(settings: Sequence[tuple[str, Any, str]], config: Config) -> str:
    rows = [(f"{key} = {_shown(value)}", origin) for key, value, origin in settings]
    for code, rule in config.rules.items():
        numbers = {"severity": rule.severity, **rule.thresholds}
        for key, number in numbers.items():
            name = f"rules.{code}.{key}"
            rows += (
                [(f"{name} = {_shown(number)}", f"{config.file}: {config.prefix}{name}")] if number is not None else []
            )
    for index in range(len(config.ignores)):
        entry = _ignore(config, index)
        told = ", ".join(f"{key} {v}" for key, v in entry.items() if v is not None and key not in ("written", "reason"))
        rows.append((f"ignore {told}: {entry['reason']}", entry["written"]))
    width = min(max(len(row[0]) for row in rows), 48)
    lines = [f"{sanitise(said):{width}}  {sanitise(origin)}" for said, origin in rows]
    return "\n".join([f"configuration file: {sanitise(config.file or 'none')}", *lines]) + "\n"


def _ignore(config: Config, index: int) -> dict[str, Any]:
    ignore = config.ignores[index]
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
