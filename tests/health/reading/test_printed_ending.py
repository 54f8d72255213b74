"""How a job has ended, by what it prints last: an exception that nothing caught, and what only looks like one."""

from __future__ import annotations

import pytest

from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health

STEPS = [f"step {at}: loss {2.5 - at / 100:.4f}" for at in range(1, 41)]
TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 9, in <module>', "    loss.backward()"]
MEMORY = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
SAID = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RAISED = [*TRACEBACK, MEMORY]


def run_of(tmp_path, *lines):
    path = tmp_path / "job.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    (run,) = health([path]).health.runs
    last = list(find_log(path).lines(ReadIssues()))[-1].line
    return run.ending, run.exit_code, getattr(last, "reason", None)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (RAISED, SAID),
        ([" 40%|####      | 40/100 [00:09<00:13,  4.4it/s]Traceback (most recent call last):", *RAISED[1:]], SAID),
        ([f"[rank{rank}]: {line}" for line in RAISED for rank in (0, 1)], SAID),
        ([*RAISED, "wandb: Find logs at: ./wandb/run-1/logs", " 40%|####      | 40/100 [00:09<00:13,  4.4it/s]"], SAID),
        (
            [
                *RAISED, "", "During handling of the above exception, another exception occurred:", "",
                *TRACEBACK, "RuntimeError: step 41 failed",
            ],
            "RuntimeError: step 41 failed",
        ),
        (
            [
                *RAISED,
                "E0607 10:00:15.123 412 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)",
                *TRACEBACK, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
                "=" * 60, "train.py FAILED", "-" * 60, "Failures:", "  <NO_OTHER_FAILURES>", "-" * 60,
                "Root Cause (first observed failure):", "[0]:", "  time      : 2024-06-07_10:00:15",
                "  exitcode  : 1 (pid: 431)", "  error_file: <N/A>", "=" * 60,
            ],
            SAID,
        ),
        ([*RAISED, "cleaning up", "srun: error: node7: task 0: Exited with exit code 1"], SAID),
        ([*TRACEBACK, "KeyboardInterrupt"], "KeyboardInterrupt"),
        (
            ["FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding."],
            "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.",
        ),
    ],
)  # fmt: skip
def test_an_exception_that_nothing_caught(tmp_path, lines, reason):
    ending, code, said = run_of(tmp_path, *STEPS, *lines)
    assert (ending, code, said) == ("ended", 130 if reason == "KeyboardInterrupt" else 1, reason)


@pytest.mark.parametrize(
    "lines",
    [
        [*RAISED, *(line.replace("step ", "step 1") for line in STEPS)],
        [*RAISED, "Retrying with half of the batch.", "Training has finished."],
        ["Saved model.pt.", "Exception ignored in: <function Pool.__del__ at 0x7f>", *TRACEBACK, "OSError: closed"],
        ["--- Logging error ---", *TRACEBACK, "BrokenPipeError: [Errno 32] Broken pipe"],
        ["Exception in thread Thread-3 (_monitor):", *TRACEBACK, "ConnectionResetError: peer"],
        ["The test of ValueError: passed", "ValueError: none seen"],
        [*RAISED, STEPS[-1].replace("step 40", "step 41"), STEPS[-1].replace("step 40", "step 42")],
    ],
)
def test_a_job_that_goes_on_or_ends_otherwise(tmp_path, lines):
    assert run_of(tmp_path, *STEPS, *lines) == ("unknown", None, None)


def fairseq(lines):
    rows = [
        f"2024-05-18 10:00:00 | INFO | train_inner | epoch 001:   {at} / 9000 loss={7 - at / 1000:.3f}, ppl=100.1, "
        f"num_updates={at}, lr=0.0005, gnorm=0.9, loss_scale=8, train_wall=25"
        for at in range(100, 3000, 100)
    ]
    said = "2024-05-18 10:00:00 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, "
    overflows = [f"{said}setting loss scale to: {8 * 0.5**at:g}" for at in range(1, lines + 1)]
    return [*rows[:15], *overflows[:2], *rows[15:], *overflows]


def test_fairseq_dies_at_its_smallest_scale(tmp_path):
    raised = "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding."
    (tmp_path / "train.log").write_text("\n".join([*fairseq(17), *TRACEBACK, raised, ""]))
    report = health([tmp_path / "train.log"])
    last = report.findings[1]
    assert [(one.code, one.severity) for one in report.findings] == [("AMP723", "error")] * 2
    assert (last.where.step, last.evidence["ended"]) == (2917, raised)
    (run,) = report.health.runs
    assert (run.skipped, run.skip_share) == (17, pytest.approx(17 / 2818))
    assert [one.what for one in report.skipped] == ["2 overflows"]
