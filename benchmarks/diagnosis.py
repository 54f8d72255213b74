"""Who names the culprit? ampdoctor and its peers over the labelled corpus, in one table.

Run: python benchmarks/diagnosis.py [--tool NAME ...] [--case ID ...] [--timeout 120] [--details FILE]

Every tool is attached to the case's plain training loop as its own documentation says; `peers/` says of each how what
it prints is read, and `peers/scoring.py` how that is judged. Every case runs in a process of its own. The peers need
`make peers`; without it their rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.answer import Answer  # noqa: E402  # the repository is on the path only now
from benchmarks.peers.scoring import Outcome, Score, mark, score  # noqa: E402
from benchmarks.peers.tools import TOOLS, Entry  # noqa: E402
from fixtures.corpus import runs  # noqa: E402

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
HEADINGS = (
    "tool",
    "first alarm at the right step",
    "exact module",
    "exact op",
    "all three",
    "cause",
    "says nothing",
    "false alarms",
    "fails",
    "seconds a case",
)


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's run over the cases.

    Attributes:
        entry: The tool.
        version: Its version, where it has one.
        outcomes: One a case; empty where the tool did not run.
        unusable: Why it did not run.
    """

    entry: Entry
    version: str = ""
    outcomes: tuple[Outcome, ...] = ()
    unusable: str | None = None

    @property
    def title(self) -> str:
        """The tool and its version."""
        return f"{self.entry.title} {self.version}".strip()


def examined(name: str, cases: list[str], timeout: float) -> Result:
    """Run one tool over the cases, in its environment."""
    entry = TOOLS[name]
    python = sys.executable if entry.own else str(PEERS_PYTHON)
    if not Path(python).exists():
        return Result(entry, unusable="its environment is missing: run `make peers`")
    command = [python, "-m", "benchmarks.peers.worker", name, f"--timeout={timeout}"]
    process = subprocess.Popen(
        [*command, *(f"--case={case}" for case in cases)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        lines = [json.loads(line) for line in process.stdout or () if line.startswith("{")]
    if not lines or process.returncode:
        return Result(entry, unusable=f"its worker ended with exit code {process.returncode}")
    if "unusable" in lines[0]:
        return Result(entry, unusable=lines[0]["unusable"])
    return Result(entry, lines[0]["version"], tuple(_outcome(line["outcome"]) for line in lines[1:]))


def _outcome(read: dict[str, Any]) -> Outcome:
    answer = read["answer"]
    if answer is not None:
        answer = Answer(**{**answer, "causes": tuple(answer["causes"])})
    return Outcome(read["case"], answer, read["seconds"], read["failure"])


def row(result: Result, labels: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Return a tool's cells."""
    if result.unusable is not None:
        return (result.title, f"not run: {result.unusable}", *[""] * (len(HEADINGS) - 2))
    sums = score(labels, result.outcomes)
    named = [outcome.answer for outcome in result.outcomes if outcome.answer is not None]
    return (
        result.title,
        str(sums.step),
        str(sums.module) if any(answer.module is not None for answer in named) else "-",
        str(sums.op) if any(answer.op is not None for answer in named) else "-",
        str(sums.place),
        str(sums.cause) if any(answer.causes for answer in named) else "-",
        str(sums.silent),
        str(sums.false_alarms),
        str(sums.failures),
        f"{sums.seconds:.2f}",
    )


def table(results: list[Result], labels: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table, as Markdown: ours first, then who places most, unusable tools last."""

    def place(result: Result) -> tuple[bool, bool, int, int, int]:
        sums: Score | None = score(labels, result.outcomes) if result.unusable is None else None
        counts = (0, 0, 0) if sums is None else (-sums.place, -sums.module, -sums.step)
        return (not result.entry.own, result.unusable is not None, *counts)

    yield "| " + " | ".join(HEADINGS) + " |"
    yield "| --- |" + " --: |" * (len(HEADINGS) - 1)
    for result in sorted(results, key=place):
        yield "| " + " | ".join(row(result, labels)) + " |"


def details(results: list[Result], labels: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield one JSON object for each tool and case: what was said, and which part of it is right."""
    for result in results:
        for outcome in result.outcomes:
            right = asdict(mark(labels[outcome.case], outcome.answer))
            yield json.dumps({"tool": result.title, **asdict(outcome), "right": right})


def main() -> None:
    """Read the options, run the tools and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all")
    parser.add_argument("--case", action="append", choices=runs.case_ids(), help="default: the whole corpus")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case")
    parser.add_argument("--details", type=Path, help="also write what each tool said of each case, as JSON lines")
    options = parser.parse_args()
    cases = options.case or runs.case_ids()
    labels = {case: runs.label(case) for case in cases}
    results = []
    for name in options.tool or TOOLS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(examined(name, cases, options.timeout))
    healthy = sum(label["kind"] == "healthy" for label in labels.values())
    print(f"\n{len(labels) - healthy} failures and {healthy} healthy controls\n")
    print(*table(results, labels), sep="\n")
    if options.details:
        options.details.write_text("".join(f"{line}\n" for line in details(results, labels)), encoding="utf-8")


if __name__ == "__main__":
    main()
