"""ampdoctor on every torch that people have: one environment after the other, and the table in benchmarks/README.md.

    python benchmarks/versions.py                     # 2.6 to the newest on the index: about 8 minutes each
    python benchmarks/versions.py 2.10.0 --keep       # one version; its environment stays in .venv-versions

For each version an environment is made in `.venv-versions` (about 5 GB where there is no CPU wheel; with `uv` if it is
installed) and removed afterwards. In it run: the help, the three commands of the demo, whose JSON is held against what
this interpreter's torch gives, the labelled corpus under CUDA's policy, and the tests of the rooms that know torch
best. What was measured goes to `versions.json`, where other versions keep what they had, and from there into the
table.
Exits 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from fixtures.demo.run_demo import acts  # noqa: E402 - from the repository's root

VERSIONS = ("2.6.0", "2.8.0", "2.10.0", "2.12.1", "2.13.0", "newest")
FOLDER = ROOT / ".venv-versions"
FIGURES = ROOT / "benchmarks" / "versions.json"
README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- versions -->\n", "<!-- /versions -->"
OWN = ("torch", "sympy", "setuptools")
"""Packages that a version of torch asks for in a version of its own: constraints.txt has those of one torch."""
ROOMS = ("precision", "probes", "replay", "loop", "numerics")
DIGITS = 4


def newest() -> str:
    """The newest torch on the index."""
    said = _output(sys.executable, "-m", "pip", "index", "versions", "torch")
    found = re.search(r"torch \(([\d.]+)", said)
    if found is None:
        raise SystemExit(f"the index names no torch: {said}")
    return found[1]


def environment(version: str) -> Path:
    """An environment with this torch and what the tests need; returns its interpreter."""
    folder = FOLDER / version
    python = folder / "bin" / "python"
    if python.exists():
        return python
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.split("==")[0] not in OWN]
    constraints = FOLDER / f"constraints-{version}.txt"
    FOLDER.mkdir(exist_ok=True)
    constraints.write_text("\n".join(pins) + "\n")
    uv = shutil.which("uv")
    if uv:
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
        install = (uv, "pip", "install", "--quiet", "--no-cache", "--python", str(python))
        links = os.environ.get("PIP_FIND_LINKS")  # pip's own settings, which uv does not read
        install += ("--find-links", links) if links else ()
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        install = (str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir")
    _run(*install, "-c", str(constraints), f"torch=={version}", "-e", f"{ROOT}[test]")
    return python


def measure(python: Path, reference: dict[str, Any], checkpoint: str, reports: Path) -> dict[str, Any]:
    """What works on an interpreter's torch."""
    facts = json.loads(_output(str(python), "-m", "ampdoctor", "env", "--format", "json"))
    found: dict[str, Any] = {
        "torch": facts["torch"],
        "python": facts["python"],
        "date": datetime.now(UTC).date().isoformat(),
        "shims": [shim.partition(":")[0] for shim in facts["torch_shims"]],
        "help": "ok" if _process(str(python), "-m", "ampdoctor", "--help").returncode == 0 else "crash",
    }
    for name, report in demo(python, checkpoint).items():
        differing = None if report is None else differences(report, reference[name])
        found[name] = "crash" if differing is None else "ok" if not differing else f"ok, {differing} numbers differ"
    found["corpus"] = tested(python, reports, "tests/corpus/test_corpus.py", "-k", "not native")
    found["tests"] = tested(python, reports, *(f"tests/{room}" for room in ROOMS))
    return found


def demo(python: Path, checkpoint: str) -> dict[str, Any]:
    """The JSON of the demo's commands; None where one does not end as it should."""
    reports = {}
    for act in acts(checkpoint):
        done = _process(str(python), "-m", "ampdoctor", *act.arguments, "--format", "json")
        reports[act.arguments[0]] = json.loads(done.stdout) if done.returncode == act.expected else None
    return reports


def differences(report: Any, other: Any) -> int:
    """How many values of two reports differ, numbers in their first four digits; the versions in it aside."""
    if isinstance(report, dict) and isinstance(other, dict):
        keys = (report.keys() | other.keys()) - {"torch", "torch_shims", "duration", "fingerprint"}
        return sum(differences(report.get(key), other.get(key)) for key in keys)
    if isinstance(report, list) and isinstance(other, list) and len(report) == len(other):
        return sum(map(differences, report, other))
    if isinstance(report, float) and isinstance(other, int | float):
        return int(not math.isclose(report, other, rel_tol=10.0**-DIGITS, abs_tol=0.0))
    return int(report != other)


def tested(python: Path, reports: Path, *arguments: str) -> dict[str, Any]:
    """What pytest counts, and the names of what fails."""
    file = reports / "junit.xml"
    file.unlink(missing_ok=True)
    settings = ("-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={file}")
    done = _process(str(python), "-m", "pytest", *settings, *arguments)
    if done.returncode not in (0, 1) or not file.exists():  # nothing was collected, or not all
        return {"passed": 0, "skipped": 0, "failed": [f"pytest ended with {done.returncode}: {done.stdout[-300:]}"]}
    cases = list(ET.parse(file).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
    }


def healthy(row: dict[str, Any]) -> bool:
    """Does everything work?"""
    crashed = any(row[name] == "crash" for name in ("help", "scan", "bisect-nan", "recommend"))
    return not crashed and not row["corpus"]["failed"] and not row["tests"]["failed"]


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown, by version."""
    rows = [
        "| torch | help | scan | bisect-nan | recommend | corpus | tests |",
        "| --- | --- | --- | --- | --- | ---: | ---: |",
    ]
    for version in sorted(figures, key=lambda one: [int(part) for part in one.split(".")]):
        row = figures[version]
        cells = [row["torch"], *(row[name] for name in ("help", "scan", "bisect-nan", "recommend"))]
        cells += [f"{one['passed']}/{one['passed'] + len(one['failed'])}" for one in (row["corpus"], row["tests"])]
        if row["tests"]["skipped"]:
            cells[-1] += f", {row['tests']['skipped']} skipped"
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def write(figures: dict[str, Any]) -> None:
    """Figures and table, where they belong."""
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{table(figures)}{END}{after}", encoding="utf-8")


def _process(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _output(*command: str) -> str:
    done = _process(*command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
    return done.stdout


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> int:
    """Measure the versions asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help="of torch, or `newest`")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    wanted = dict.fromkeys(newest() if version == "newest" else version for version in options.versions)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "run.pt")
        _output(sys.executable, "fixtures/demo/sick_checkpoint.py", checkpoint)
        reference = demo(Path(sys.executable), checkpoint)
        for version in wanted:
            print(f"torch {version} ...", flush=True)
            figures[version] = measure(environment(version), reference, checkpoint, Path(folder))
            print(json.dumps(figures[version], indent=1), flush=True)
            write(figures)
            if not options.keep:
                shutil.rmtree(FOLDER / version, ignore_errors=True)
    return 0 if all(healthy(figures[version]) for version in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
