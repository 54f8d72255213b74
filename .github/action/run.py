"""What the step of action.yml runs: inputs become flags, the report's place and verdict become outputs.

Reads `AMPDOCTOR_INPUTS` (the action's inputs as a JSON object of strings), `RUNNER_TEMP` and `GITHUB_OUTPUT`; no shell
sees an input.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = ("scan", "health", "bisect-nan", "profile", "recommend", "plan", "merge")
LISTS = ("report", "threshold", "export", "arg")
SWITCHES = (
    *("exit-zero", "allow-partial", "isolated", "github-summary", "quiet"),
    *("all", "skip-lfs-pointers", "expect-failure"),
)
VALUES = (
    *("fail-on", "baseline", "write-baseline", "config", "format", "against", "checkpoint", "steps", "precision"),
    *("policy", "device", "app-dir", "batches", "loss", "save", "emit"),
    *("global-batch", "micro-batch", "gpus", "to-gpus", "max-micro-batch"),
)
EXIT_ERROR = 2


class WrongInputError(Exception):
    """An input has no meaning; one sentence."""


def lines(text: str) -> list[str]:
    """The entries of a list, one a line; an empty line is none.

    A line ends with a newline and with nothing else that Unicode calls one, and all of it is the entry: a name may have
    spaces at its end, and without them it is another file's.
    """
    return [line for line in re.split(r"\r?\n", text) if line]


def targets(text: str) -> list[str]:
    """The entries of the list of what is examined.

    Raises:
        WrongInputError: A file's own name ends in the carriage return that may as well be the end of its line.
    """
    for line in text.split("\n"):
        if line.endswith("\r") and os.path.lexists(line):
            raise WrongInputError(f"target names {line!r}: a name that ends so cannot be told from the end of a line")
    return lines(text)


def arguments(inputs: dict[str, str], folder: Path) -> list[str]:
    """The command line's arguments.

    Args:
        inputs: Of the action.
        folder: Where the JSON and the SARIF report go.

    Raises:
        WrongInputError: The command is none that makes a report, a switch is neither true nor false, or a target's name
            cannot be told.
    """
    command = inputs.get("command", "").strip()
    if command not in COMMANDS:
        raise WrongInputError(f"command is {command!r}, and not one of {', '.join(COMMANDS)}")
    made = [command]
    for name in SWITCHES:
        value = inputs.get(name, "").strip().lower()
        if value not in ("", "true", "false"):
            raise WrongInputError(f"{name} is {value!r}, and neither true nor false")
        made += [f"--{name}"] * (value == "true")
    values = {name: inputs.get(name, "").removesuffix("\n") for name in VALUES}  # with one a block of YAML ends
    made += [f"--{name}={value}" for name, value in values.items() if value]
    made += [f"--{name}={entry}" for name in LISTS for entry in lines(inputs.get(name, ""))]
    made += [f"--report=json={folder / 'report.json'}", f"--report=sarif={folder / 'report.sarif'}"]
    return [*made, *lines(inputs.get("args", "")), "--", *targets(inputs.get("target", ""))]


def outputs(code: int, folder: Path) -> dict[str, str]:
    """The action's outputs: what there is of the report."""
    report, sarif = folder / "report.json", folder / "report.sarif"
    verdict = json.loads(report.read_text(encoding="utf-8"))["verdict"] if report.is_file() else ""
    return {
        "exit-code": str(code),
        "verdict": verdict,
        "report": str(report) if report.is_file() else "",
        "sarif": str(sarif) if sarif.is_file() else "",
    }


def main() -> int:
    """Run ampdoctor; returns its exit code."""
    folder = Path(tempfile.mkdtemp(prefix="ampdoctor-", dir=os.environ.get("RUNNER_TEMP")))
    try:
        given = arguments(json.loads(os.environ["AMPDOCTOR_INPUTS"]), folder)
    except WrongInputError as error:
        sys.stderr.write(f"ampdoctor action: error: {error}\n")
        code = EXIT_ERROR
    else:
        code = subprocess.run([sys.executable, "-P", "-m", "ampdoctor", *given], check=False).returncode  # noqa: S603
    if file := os.environ.get("GITHUB_OUTPUT"):
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.writelines(f"{name}={value}\n" for name, value in outputs(code, folder).items())
    return code


if __name__ == "__main__":
    sys.exit(main())
