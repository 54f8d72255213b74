"""The README and the pages of docs/ say what is so: transcripts, usage, code blocks, figures and links are checked.

After a change that is meant, `PYTHONPATH=. python tests/test_readme.py` writes the transcript and the commands anew.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.docs.pages import blocks

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FACTORY_PAGE = ROOT / "docs" / "factory.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
RUN_PAGE = ROOT / "docs" / "howto" / "nan-at-step-31000.md"
TRANSCRIPT, COMMANDS = "<!-- transcript -->", "<!-- commands -->"
WIDTH = 100


@functools.cache
def ampdoctor(*arguments, python=sys.executable):
    """Standard output and exit code of `ampdoctor`, as on a terminal of the README's width without colour."""
    kept = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "TTY_COMPATIBLE"}}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    env = {**kept, "PYTHONPATH": path, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    done = subprocess.run(
        [python, "-m", "ampdoctor", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout, done.returncode


def transcript():
    """First line, finding and last line of a watched training, from the page whose commands tests/docs runs."""
    text = RUN_PAGE.read_text(encoding="utf-8")
    lines = next(block.text for block in blocks(text) if block.is_run).replace(" 2>&1\n", "\n").splitlines()
    first, last = (next(at for at, line in enumerate(lines) if line.startswith(word)) for word in ("ERROR", "WHY"))
    return "\n".join([*lines[:2], "...", *lines[first : last + 1], "...", lines[-1], ""])


def commands(python=sys.executable):
    """Usage and purpose of every command, from its own help."""
    listed = ampdoctor("--help", python=python)[0].partition("Commands:\n")[2].partition("\n\n")[0]
    lines = []
    for line in listed.splitlines():
        name, _, purpose = line.strip().partition("  ")
        usage = ampdoctor(name, "--help", python=python)[0].splitlines()[0].removeprefix("Usage: ")
        lines.append(f"{usage:54}{purpose.strip()}")
    return "\n".join(lines) + "\n"


def marked(marker):
    """A pattern of the code block that follows a marker of the README."""
    return re.compile(rf"(?<={re.escape(marker)})(\n```\w*\n)(.*?)```", re.DOTALL)


def block(marker):
    return marked(marker).search(README.read_text(encoding="utf-8")).group(2)


def python_block(page):
    return re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL).group(1)


def rewrite():
    text = README.read_text(encoding="utf-8")
    for marker, made in ((TRANSCRIPT, transcript()), (COMMANDS, commands())):
        text = marked(marker).sub(lambda found, made=made: f"{found.group(1)}{made}```", text)
    README.write_text(text, encoding="utf-8")


def test_the_transcript_is_what_the_command_prints():
    shown = block(TRANSCRIPT)
    assert shown == transcript()
    assert shown.startswith("$ ampdoctor run ")
    folded = [line for line in shown.splitlines() if not line.startswith("ampdoctor: ")]  # an alert is one line
    assert max(map(len, folded)) <= WIDTH
    assert "verified by replay" in shown


def test_the_commands_and_their_usage_are_those_of_the_help(python):
    assert block(COMMANDS) == commands(python)


def test_the_factory_of_the_readme_runs(tmp_path, run_cli):
    (tmp_path / "run.py").write_text(python_block(README), encoding="utf-8")
    result = run_cli("bisect-nan", "run.py:make_run", cwd=tmp_path)
    assert "verdict: healthy" in result.stdout, result.stderr
    assert result.returncode == 0


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available:UserWarning")
def test_the_lines_that_apply_a_report_run(tmp_path, monkeypatch):
    import torch

    lines = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    report = '{"findings": [{"prescription": {"kind": "fp32_modules", "value": ["0"], "status": "verified"}}]}'
    (tmp_path / "report.json").write_text(report, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    space = {"torch": torch, "ampdoctor": importlib.import_module("ampdoctor"), "Net": lambda: model}
    exec(lines, space)
    assert model[0]._forward_pre_hooks


def test_the_step_of_the_factory_page_runs(tmp_path, run_cli):
    run = """
import torch
from ampdoctor import TrainingRun

def make_run():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingRun(model=model, batches=[torch.ones(2, 4)], step=step, optimizer=optimizer, scaler={})
"""
    (tmp_path / "run.py").write_text(python_block(FACTORY_PAGE) + run, encoding="utf-8")
    result = run_cli("bisect-nan", "run.py:make_run", cwd=tmp_path)
    assert "verdict: healthy" in result.stdout, result.stderr


def test_the_factory_page_has_every_field_with_its_default():
    from ampdoctor import TrainingRun

    text = FACTORY_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE)
    required = {"model", "batches"}
    expected = [
        (field.name, "required" if field.name in required else f"`{field.default!r}`".replace("'", '"'))
        for field in fields(TrainingRun)
    ]
    assert rows == expected


def test_the_exit_codes_are_those_of_the_help(python):
    codes = re.findall(r"^\| (\d+) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert codes == re.findall(r"(?:codes: |, )(\d+) ", " ".join(ampdoctor("--help", python=python)[0].split()))


def test_options_that_are_named_exist(python):
    commands = ("run", "health", "scan", "bisect-nan", "profile", "recommend", "plan", "merge")
    known = set(
        re.findall(r"--[a-z][a-z0-9-]+", "".join(ampdoctor(name, "--help", python=python)[0] for name in commands))
    )
    known |= {"--resume", "--cure", "--width", "--lr"}  # of the pages' own scripts
    known |= {"--extra-index-url"}  # pip's
    known |= {"--decrease-batch-size-if-needed"}  # Megatron-LM's
    known |= {"--nproc-per-node", "--standalone", "--log-interval", "--training"}  # torchrun, Megatron-LM, torchtitan
    known |= {"--install-completion", "--show-completion"}  # of ampdoctor itself
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text(encoding="utf-8")))
        assert named <= known, page


def test_links_lead_somewhere():
    for page in PAGES:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_the_step_times_are_those_of_the_benchmarks_page():
    text = README.read_text(encoding="utf-8")
    ratios = re.findall(r"^\| .* \| .* \| .* \| ([\d.]+ to [\d.]+) \|$", text, re.MULTILINE)
    results = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert len(ratios) == 4
    for ratio in ratios:
        assert f"| hand-written loop | {ratio} |" in results


def test_the_figures_of_the_corpus_are_those_of_the_repository():
    from fixtures.corpus import runs

    cases = runs.case_ids()
    kinds = ["healthy" if runs.label(case)["kind"] == "healthy" else "sick" for case in cases]
    right = [kind for case, kind in zip(cases, kinds, strict=True) if case not in runs.not_found_yet()]
    said = re.search(
        r"has (\d+) \[labelled runs\].*?: (\d+) sick and (\d+) healthy.*?right in (\d+) of the sick ones.*?"
        r"false alarm at (\d+) of the healthy ones",
        " ".join(README.read_text(encoding="utf-8").split()),
    )
    sick, healthy = kinds.count("sick"), kinds.count("healthy")
    expected = [len(cases), sick, healthy, right.count("sick"), healthy - right.count("healthy")]
    assert [int(number) for number in said.groups()] == expected


if __name__ == "__main__":
    rewrite()
