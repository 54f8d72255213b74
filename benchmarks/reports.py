"""What ampdoctor says of everything in `fixtures/`, before a change and after it.

Run: python benchmarks/reports.py write FOLDER [--part PART ...] [--only WORD] [--every N] [--jobs 2]
     python benchmarks/reports.py compare BEFORE AFTER

`write` runs each command in a process of its own and keeps its JSON report, what it printed and its exit code; what
FOLDER holds already is not run again. `compare` shows every difference but those in numbers of replays, seconds, and
versions, and ends with 1 if there is one. Nothing here is measured in time.

A move or a cut may show no difference. It is run in a checkout without and in one with the change, on one machine:
trainings that diverge do so otherwise on other processors.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"
LIMIT = 600  # seconds a command may take
SHOWN = 14  # lines of one report's differences


@dataclass(frozen=True, slots=True)
class Job:
    """One command, by a name that is a file's name."""

    name: str
    arguments: tuple[str, ...]


def corpus() -> Iterator[Job]:
    """Each labelled case, under both autocast policies."""
    for case in sorted(path.stem for path in (FIXTURES / "corpus" / "cases").glob("*.py")):
        for policy in ("cuda", "native"):
            factory = ("fixtures/corpus/runs.py:make_run", "--arg", f'case="{case}"', "--policy", policy)
            yield Job(f"{case}.{policy}", ("bisect-nan", *factory))


def advice() -> Iterator[Job]:
    """`profile` and `recommend` of the demo's runs and of every eighth case."""
    targets = [(f"demo.{path.stem}", (f"fixtures/demo/{path.name}:make_run",)) for path in FIXTURES.glob("demo/*.py")]
    targets += [(job.name, job.arguments[1:]) for job in list(corpus())[::16]]
    for name, target in targets:
        if not (name.startswith("demo.") and "def make_run" not in (ROOT / target[0].partition(":")[0]).read_text()):
            yield Job(f"profile.{name}", ("profile", *target, "--steps", "4"))
            yield Job(f"recommend.{name}", ("recommend", *target, "--steps", "8"))


def loops() -> Iterator[Job]:
    """The scripts without a factory, healthy and sick, and the inputs of public reports."""
    sick = {
        "nanogpt": ("--learning_rate=3.0",),
        "vision_ema": ("--norm-per-image",),
        "gan": ("--log-loss", "--lrD", "0.02"),
        "ppo": ("--bf16", "--learning-rate", "5e-5"),
        "diffusion": ("--zero_snr",),
    }
    for name, arguments in sick.items():
        yield Job(f"{name}.healthy", ("bisect-nan", f"fixtures/loops/{name}.py"))
        yield Job(f"{name}.sick", ("bisect-nan", f"fixtures/loops/{name}.py", "--", *arguments))
    for path in sorted(FIXTURES.glob("public/*/script.py")):
        yield Job(f"public.{path.parent.name}", ("bisect-nan", str(path.relative_to(ROOT))))


def logs() -> Iterator[Job]:
    """`health`, `recommend` and `scan` of each log."""
    found = [*FIXTURES.glob("public/*/*.json"), *FIXTURES.glob("public/*/*.csv"), *FIXTURES.glob("public/*/*.log")]
    found += [FIXTURES / "public" / "scalars_json_note", *FIXTURES.glob("logs/tensorboard/*")]
    for path in sorted(found):
        name = str(path.relative_to(FIXTURES)).replace("/", ".")
        for command in ("health", "recommend", "scan"):
            yield Job(f"{command}.{name}", (command, str(path.relative_to(ROOT))))


def checkpoints() -> Iterator[Job]:
    """`scan` of each layout: folders, and their files by themselves."""
    for truth in sorted(FIXTURES.glob("checkpoints/expected/*.json")):
        layout = FIXTURES / "checkpoints" / truth.stem
        yield Job(f"layout.{truth.stem}", ("scan", str(layout.relative_to(ROOT))))
        for path in sorted(layout.iterdir()):
            yield Job(f"layout.{truth.stem}.{path.name}", ("scan", str(path.relative_to(ROOT))))


PARTS = {"corpus": corpus, "advice": advice, "loops": loops, "logs": logs, "checkpoints": checkpoints}


def run(job: Job, folder: Path) -> int:
    """Run one command in a fork, in a copy of nothing: its working folder is empty but for a link to the fixtures."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    work = Path(tempfile.mkdtemp())
    (work / "fixtures").symlink_to(FIXTURES)
    os.chdir(work)
    os.environ.update(COLUMNS="100", XDG_CACHE_HOME=str(work / "cache"), HOME=str(work))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    told = os.open(work / "told.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(told, 1)
    os.dup2(told, 2)
    signal.alarm(LIMIT)
    command, *rest = job.arguments
    split = rest.index("--") if "--" in rest else len(rest)
    sys.argv = ["ampdoctor", command, *rest[:split], "--report", f"json={work}/report.json", *rest[split:]]
    from ampdoctor.__main__ import main

    code: object = 70
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        report = work / "report.json"
        text = report.read_text() if report.exists() else ""
        printed = (work / "told.txt").read_text(errors="replace")
        whole = f"exit code {code}\n\n{printed}\n\n{text}".replace(str(work), "WORK").replace(str(ROOT), "ROOT")
        partial = folder / f"{job.name}.{os.getpid()}.partial"
        partial.write_text(whole)
        partial.rename(folder / f"{job.name}.txt")
        shutil.rmtree(work, ignore_errors=True)
        os._exit(0)


def write(folder: Path, jobs: list[Job], processes: int) -> int:
    """Write each job's report that is not there; the number of jobs that left none."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = [job for job in jobs if not (folder / f"{job.name}.txt").exists()]
    sys.path.insert(0, str(ROOT))
    import torch

    import ampdoctor.__main__  # noqa: F401  # imported once, before the forks

    torch.set_num_threads(1)
    begun = time.monotonic()
    workers = []
    for number in range(processes):
        worker = os.fork()
        if not worker:
            for job in todo[number::processes]:
                run(job, folder)
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)
    missing = [job.name for job in jobs if not (folder / f"{job.name}.txt").exists()]
    print(f"{len(todo)} written in {time.monotonic() - begun:.0f} s; {len(missing)} left no report: {missing[:10]}")
    return len(missing)


_UNSTEADY = (
    (re.compile(r"(\d+) (bad-step )?replays?\b"), "N replays"),
    (re.compile(r"\d+(\.\d+)? (s|ms|MB|MiB|GB)\b"), "N"),
    (re.compile(r'"(seconds|replays|duration_seconds|created|peak_memory_bytes|version)": [^\n]*'), r'"\1": N'),
)


def steady(text: str) -> list[str]:
    """The lines of a report, without what differs between two runs of the same code."""
    for pattern, instead in _UNSTEADY:
        text = pattern.sub(instead, text)
    return text.splitlines()


def compare(before: Path, after: Path) -> int:
    """Print the differences; the number of reports that differ or are missing."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.txt")})
    differing = 0
    for name in names:
        texts = [folder / name for folder in (before, after)]
        if not all(path.exists() for path in texts):
            differing += 1
            print(f"== {name}: only in {(before if texts[0].exists() else after).name}")
            continue
        lines = list(difflib.unified_diff(*(steady(path.read_text()) for path in texts), lineterm="", n=0))[2:]
        if lines:
            differing += 1
            print(f"== {name}", *(f"    {line[:200]}" for line in lines[:SHOWN]), sep="\n")
    print(f"{len(names)} compared, {differing} differ")
    return differing


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--part", action="append", choices=PARTS, help="all where none is named")
    writing.add_argument("--only", default="", help="a word that a report's name holds")
    writing.add_argument("--every", type=int, default=1, help="of each part only each N-th")
    writing.add_argument("--jobs", type=int, default=2)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.command == "compare":
        return int(compare(asked.before, asked.after) > 0)
    parts = asked.part or list(PARTS)
    jobs = [job for part in parts for job in list(PARTS[part]())[:: asked.every] if asked.only in job.name]
    return int(write(asked.folder.resolve(), jobs, asked.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
