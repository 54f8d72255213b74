"""The human report as people see it: samples and real commands, held as plain files at fixed widths.

After a change that is meant: `PYTHONPATH=. python tests/reports/test_snapshots.py [NAME]...` writes them anew.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from ampdoctor.reports.human import render_human
from tests.arithmetic import ALIKE
from tests.samples import EVERY

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = Path(__file__).with_name("snapshots")
CHECKPOINTS = "fixtures/checkpoints"
SAVES = f"{CHECKPOINTS}/hf_trainer_fp16/checkpoint"
SICK = "SICK"
"""Stands for a sick checkpoint, which is written for the occasion."""
COMMANDS = {
    "scan-sick": ["scan", SICK],
    "scan-many": ["scan", f"{CHECKPOINTS}/hf_trainer_fp16"],
    "scan-several": ["scan", f"{CHECKPOINTS}/torch_zip/step4.pt", f"{CHECKPOINTS}/hf_safetensors"],
    "scan-list": ["scan", f"{CHECKPOINTS}/deepspeed_zero2", "--list"],
    "scan-against": ["scan", f"{SAVES}-4", "--against", f"{SAVES}-2"],
    "bisect-nan": ["bisect-nan", "fixtures/demo/t5_ffn.py:make_run"],
    "bisect-nan-quiet": ["bisect-nan", "fixtures/demo/t5_ffn.py:make_run", "-q"],
    "profile": ["profile", "tests/reports/named_layers.py:make_run"],
    "recommend": ["recommend", "tests/reports/named_layers.py:make_run"],
    "plan": (
        "plan --global-batch 2048 --gpus 512 --to-gpus 128 --device-memory 80GB --memory-per-sample 6GB --params 7B "
        "--shard-stage 3 --emit megatron"
    ).split(),
    "plan-near": ["plan", "--global-batch", "2048", "--gpus", "512", "--to-gpus", "100", "--max-micro-batch", "8"],
    "rule": ["rule", "AMP201"],
}
WIDTHS = (60, 200)
"""Of samples; commands are shown at 80."""


def sample(name, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render_human(EVERY[name], console)
    return tidy(console.file.getvalue())


def command(name, python=sys.executable):
    """What a command prints on a terminal of 80 columns without colour."""
    kept = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "TTY_COMPATIBLE"}}
    env = {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1", **ALIKE}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        sick = Path(folder) / "run.pt"
        if SICK in COMMANDS[name]:
            subprocess.run([python, "fixtures/demo/sick_checkpoint.py", str(sick)], check=True, **options)
        arguments = [str(sick) if argument == SICK else argument for argument in COMMANDS[name]]
        done = subprocess.run([python, "-m", "ampdoctor", *arguments], check=False, timeout=300, **options)
    assert done.returncode in (0, 1), done.stderr
    return tidy(done.stdout.replace(folder, "FOLDER"))


def tidy(text):
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def held(name):
    return (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", EVERY)
def test_a_sample_is_shown_as_it_was(name, width):
    assert sample(name, width) == held(f"sample-{name}-{width}")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_printed(name, python):
    assert command(name, python) == held(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_snapshot_fits_its_width(name):
    code = ("    ", "  torch.", "  ampdoctor ")  # what is to be copied is never folded
    prose = [line for line in held(name).splitlines() if not line.startswith(code)]
    assert max(map(len, prose)) <= 80


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in {"rule", "bisect-nan-quiet"}])
def test_a_report_begins_with_its_verdict_and_ends_with_what_to_do(name):
    lines = held(name).splitlines()
    assert lines[0].startswith("ampdoctor ")
    assert lines[1].startswith("verdict: ")
    last = next(line for line in reversed(lines) if not line.startswith("  "))
    assert last.startswith("next: ")


def test_every_snapshot_is_held_by_a_test():
    names = {*COMMANDS, *(f"sample-{name}-{width}" for name in EVERY for width in WIDTHS)}
    assert {path.stem for path in SNAPSHOTS.iterdir()} == names


def rewrite(names):
    SNAPSHOTS.mkdir(exist_ok=True)
    texts = {name: command(name) for name in COMMANDS if name in names or not names}
    texts |= {f"sample-{name}-{width}": sample(name, width) for name in EVERY for width in WIDTHS}
    for name, text in texts.items():
        (SNAPSHOTS / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite(sys.argv[1:])
