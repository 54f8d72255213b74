"""`--checkpoints`: what is pinned, scanned, called good, and let go; each scan is the real one, in its own process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import AlertLine, CheckpointLine, Line, LogRecord, LookLine, Stamp, StepLine
from ampdoctor.evidence.report import Finding
from ampdoctor.workflows import good_checkpoints
from ampdoctor.workflows.good_checkpoints import CheckpointKeeper

WEIGHTS = {"layer.weight": torch.ones(4, 4), "layer.bias": torch.zeros(4)}
SICK = {**WEIGHTS, "layer.bias": torch.tensor([0.0, float("nan"), 0.0, 0.0])}


class Run:
    """A training by hand: steps go to the keeper as its log would give them, and files to `out`."""

    def __init__(self, folder: Path, *, probation: int = 3, most_bytes: int = 10**9) -> None:
        self.out, self.health = folder / "out", folder / "health"
        self.lines: list[CheckpointLine] = []
        self.said: list[str] = []
        self.steps = 0
        self.health.mkdir(exist_ok=True)
        self.keeper = CheckpointKeeper(
            self.out, self.health, self._written, self.said.append, probation=probation, most_bytes=most_bytes
        )
        self.keeper.idle()

    def _written(self, line: Line) -> None:
        assert isinstance(line, CheckpointLine)
        self.lines.append(line)

    def hear(self, line: Line) -> None:
        stamp = Stamp(run_id="run", time_ms=time.time_ns() // 1_000_000)
        self.keeper.add(LogRecord(stamp=stamp, line=line))

    def step(self, count: int = 1, *, loss: float = 1.0, skipped: bool = False) -> None:
        for _ in range(count):
            time.sleep(0.01)  # a step in the millisecond of a save counts as one before it
            self.hear(StepLine(step=self.steps, accepted=self.steps, loss=loss, skipped=skipped))
            self.steps += 1
        self.keeper.idle()

    def save(self, name: str, state: dict[str, torch.Tensor] = WEIGHTS) -> None:
        place = self.out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, place)
        self.keeper.idle()

    def end(self) -> None:
        self.keeper._ending.set()
        until(self.keeper._ended.is_set, self.keeper.idle)

    @property
    def kept(self) -> set[str]:
        return {one.name for one in (self.health / "good").glob("[!.]*")}

    @property
    def last_good(self) -> str:
        return str((self.health / "last_good").readlink())

    def known(self) -> dict[str, tuple[str, str]]:
        return {Path(line.path).name: (line.health, line.reason) for line in self.lines}


def until(true: Callable[[], bool], again: Callable[[], None], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        again()
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(good_checkpoints, "_SETTLED_S", 0.0)
    monkeypatch.setattr(good_checkpoints, "_EVERY_S", 0.0)
    return


def test_a_checkpoint_is_good_after_its_clean_steps_and_outlives_its_rotation(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(2)
    run.save("checkpoint-2/model.pt")
    run.save("checkpoint-2/optimizer.pt")
    run.step(3)
    shutil.rmtree(run.out / "checkpoint-2")
    run.step()
    run.end()
    assert run.last_good == "good/checkpoint-2"
    assert sorted(one.name for one in (run.health / "last_good").iterdir()) == ["model.pt", "optimizer.pt"]
    assert torch.equal(torch.load(run.health / "last_good/model.pt")["layer.weight"], torch.ones(4, 4))
    assert run.known() == {"checkpoint-2": ("good", "finite, and 3 clean steps after it")}
    assert run.keeper.good == "checkpoint-2"


def test_the_scan_has_no_options_of_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's environment names the report of the training: a scan of a checkpoint must not write there."""
    monkeypatch.setenv("AMPDOCTOR_OUTPUT", str(tmp_path / "report.txt"))
    (tmp_path / "json.py").write_text("raise SystemExit('not this module')")
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path)
    run.save("step-1.pt")
    run.step(4)
    run.end()
    assert run.last_good == "good/step-1.pt"
    assert not (tmp_path / "report.txt").exists()


def test_a_sick_checkpoint_is_named_and_let_go_and_stays_where_it_lies(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    run.save("step-1.pt", SICK)
    run.step(5)
    run.end()
    assert run.known()["step-1.pt"] == ("sick", "layer.bias holds 1 NaN among 4 values in fp32.")
    assert run.said == ["checkpoint step-1.pt is sick: layer.bias holds 1 NaN among 4 values in fp32."]
    assert (run.out / "step-1.pt").exists()
    assert run.kept == set()
    assert not (run.health / "last_good").exists()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (StepLine(step=3, accepted=3, loss=float("nan")), "step 3 was not finite"),
        (StepLine(step=3, accepted=3, loss=1.0, gradient_norm=float("inf")), "step 3 was not finite"),
        (LookLine(step=3, verdict="sick"), "step 3 was sick"),
        (
            AlertLine(
                step=3,
                finding=Finding(
                    code="AMP721",
                    name="loss-diverges",
                    severity="error",
                    message="it grows",
                    where=Where(step=3, phase="loss"),
                ),
            ),
            "an alert (AMP721) came at step 3",
        ),
        (StepLine(step=3, accepted=3, loss=1.0, gradient_norm=float("inf"), skipped=True), None),
    ],
)
def test_a_sick_step_ends_a_probation_and_a_skipped_one_does_not(tmp_path: Path, line: Line, why: str | None) -> None:
    run = Run(tmp_path)
    run.save("step-1.pt")
    run.step(2)
    time.sleep(0.01)
    run.hear(line)
    run.steps = 4
    run.step(2)
    run.end()
    if why is None:
        assert run.last_good == "good/step-1.pt"
    else:
        assert run.known()["step-1.pt"] == ("finite", f"not kept: {why}, before 3 clean steps")
        assert run.kept == set()


def test_a_name_that_is_written_over_is_copied_and_the_last_two_good_ones_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, probation=1)
    for value in (1.0, 2.0, 3.0):
        run.save("last.pt", {"layer.weight": torch.full((4, 4), value)})
        until(lambda: run.keeper._scan is None, run.step)
        run.step()
    run.end()
    assert len(run.kept) == 2
    assert torch.load(run.health / "last_good")["layer.weight"][0, 0] == 3.0


def test_a_linked_file_that_is_written_over_is_let_go(tmp_path: Path) -> None:
    run = Run(tmp_path, probation=1)
    run.save("step-1.pt")
    run.keeper.idle()
    assert run.kept == {"step-1.pt"}
    with (run.out / "step-1.pt").open("r+b") as file:
        file.write(b"nothing of use")
    run.keeper.idle()
    assert ("unknown", "its file was written over") in [(line.health, line.reason) for line in run.lines]
    run.keeper.close()


def test_copies_stop_at_their_bound(tmp_path: Path) -> None:
    run = Run(tmp_path, most_bytes=10)
    run.save("last.pt")
    run.keeper.idle()
    assert "beyond --good-max" in run.known()["last.pt"][1]
    assert not (run.health / "good").exists() or run.kept == set()


def test_what_lay_there_before_the_run_is_not_the_run_s(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    torch.save(WEIGHTS, tmp_path / "out/step-1.pt")
    time.sleep(0.05)  # a file's time is up to a clock tick behind
    run = Run(tmp_path)
    run.step(5)
    run.end()
    assert run.lines == []


def test_a_later_process_of_the_run_goes_on_from_what_is_kept(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.save("step-1.pt")
    first.step(4)
    first.end()
    first.save("step-5.pt")  # after the end: pinned by nobody
    second = Run(tmp_path)
    assert second.keeper.good == "step-1.pt"
    second.save("step-9.pt")
    second.step(4)
    second.end()
    assert second.last_good == "good/step-9.pt"
    assert second.kept == {"step-1.pt", "step-9.pt"}


@pytest.mark.parametrize("name", ["model.pt", "version_0/checkpoints/epoch=1-step=10.ckpt", "best/model.pt"])
def test_names_that_frameworks_use(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    run.save(name)
    run.step(4)
    run.end()
    assert (run.health / "last_good").exists()


SAVING = """
import os, shutil, sys, torch
from pathlib import Path
from ampdoctor import watch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
out = Path("out")
out.mkdir(exist_ok=True)
with watch(folder="health", checkpoints="out", probation=1):
    for step in range(int(sys.argv[1]), 10**6):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            torch.save(model.state_dict(), out / f"step-{step}.pt")
            for old in sorted(out.iterdir(), key=os.path.getmtime)[:-1]:
                old.unlink()
"""


@pytest.mark.slow
def test_a_killed_training_leaves_a_last_good_checkpoint_that_loads(tmp_path: Path) -> None:
    """Killed at any moment, `last_good` is what it was or what it becomes, and never half of one."""
    kills = 0
    for attempt in range(8):
        command = [sys.executable, "-c", SAVING, str(attempt * 10_000)]
        running = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        link = tmp_path / "health/last_good"
        until(lambda: link.exists() or running.poll() is not None, lambda: None, 120)  # noqa: B023 - called here
        time.sleep(0.37 * attempt)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        kills += 1
        assert torch.load(link)["weight"].isfinite().all()
    assert kills == 8
