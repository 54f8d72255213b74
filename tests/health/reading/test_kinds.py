from __future__ import annotations

import json
import math
import os

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, StepLine
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health


def read(path):
    found, noticed = find_log(path), ReadIssues()
    return found.kind.format, list(found.lines(noticed)), noticed


def steps(lines):
    return [one.line for one in lines if isinstance(one.line, StepLine)]


TRAINER_STATE = {
    "global_step": 20,
    "log_history": [
        {"epoch": 0.5, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 2.5, "num_input_tokens_seen": 640, "step": 10},
        {"epoch": 0.5, "eval_loss": 2.4, "eval_runtime": 0.1, "step": 10},
        {"epoch": 1.0, "grad_norm": "nan", "learning_rate": 5e-5, "loss": 2.0, "step": 20},
        {"epoch": 1.0, "step": 20, "total_flos": 1.0, "train_loss": 2.25, "train_runtime": 3.5},
    ],
}


def test_the_trainers_state(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps(TRAINER_STATE))
    for path in (tmp_path, tmp_path / "trainer_state.json"):
        kind, lines, noticed = read(path)
        first, second = steps(lines)
        assert kind == "transformers"
        assert (first.step, first.loss, first.gradient_norm, first.learning_rates) == (10, 2.5, 1.5, (1e-4,))
        assert (first.tokens, second.loss) == (640, 2.0)
        assert math.isnan(second.gradient_norm)
        assert isinstance(lines[-1].line, EndLine)
        assert "logging_nan_inf_filter" in noticed.skipped[0].reason


def test_lightnings_table(tmp_path):
    text = "epoch,lr-AdamW,step,train_loss,val_loss\n,0.01,9,,\n0,,9,0.5,\n0,,9,,0.7\n,0.02,19,,\n0,,19,nan,\n"
    folder = tmp_path / "lightning_logs" / "version_3"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    kind, lines, _ = read(tmp_path)
    first, second = steps(lines)
    assert (kind, first.step, first.loss, first.learning_rates) == ("lightning", 9, 0.5, (0.01,))
    assert (second.step, second.learning_rates) == (19, (0.02,))
    assert math.isnan(second.loss)


MEGATRON = """\
using world size: 8, data-parallel size: 1
 [2026-11-02 10:00:01] iteration        1/     500 | consumed samples:          512 | elapsed time per iteration (ms): \
1250.0 | learning rate: 1.5E-05 | global batch size:   512 | lm loss: 1.087E+01 | loss scale: 65536.0 | grad norm: \
2.500 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration        2/     500 | consumed samples:         1024 | elapsed time per iteration (ms): 1000.0 | learning \
rate: 1.5E-05 | global batch size:   512 | loss scale: 32768.0 | grad norm: inf | number of skipped iterations:   1 | \
number of nan iterations:   1 |
 validation loss at iteration 2 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 |
 iteration       12/     500 | consumed samples:         6144 | elapsed time per iteration (ms): 1000.0 | learning \
rate: 1.5E-05 | global batch size:   512 | lm loss: 9.0E+00 | loss scale: 32768.0 | grad norm: 1.250 | number of \
skipped iterations:   3 | number of nan iterations:   0 |
"""


def test_megatrons_lines(tmp_path):
    (tmp_path / "main_log.txt").write_text(MEGATRON)
    for path in (tmp_path, tmp_path / "main_log.txt"):
        kind, lines, _ = read(path)
        first, second, third = steps(lines)
        assert kind == "megatron"
        assert (first.step, first.loss, first.loss_scale, first.skipped) == (1, 10.87, 65536.0, False)
        assert (first.samples, first.gradient_norm, first.learning_rates) == (512, 2.5, (1.5e-5,))
        assert first.seconds == 1.25
        assert (second.step, second.skipped, second.gradient_norm) == (2, True, math.inf)
        assert math.isnan(second.loss)
        # three of ten iterations were skipped: which, the line does not say
        assert (third.step, third.loss, third.skipped) == (12, 9.0, None)


def line_of_megatron(iteration, scale, skipped):
    loss = "" if skipped else f"lm loss: {9.0 - iteration / 100:.6E} | "
    return (
        f" iteration {iteration:8}/     500 | learning rate: 1.5E-05 | {loss}loss scale: {scale} | "
        f"number of skipped iterations: {skipped:3} | number of nan iterations:   0 |\n"
    )


def test_a_scaler_of_megatron_settles_from_the_first_iteration_on(tmp_path):
    settling = [line_of_megatron(1 + at, 2.0 ** (31 - at), 1) for at in range(17)]
    taken = [line_of_megatron(18 + at, 2.0**15, 0) for at in range(40)]
    (tmp_path / "job.out").write_text("".join([*settling, *taken]))
    assert [one.skipped for one in steps(read(tmp_path)[1])] == [True] * 17 + [False] * 40
    assert health([tmp_path]).findings == ()
    falling = [line_of_megatron(58 + at, 2.0 ** (14 - at), 1) for at in range(4)]
    (tmp_path / "job.out").write_text("".join([*settling, *taken, *falling]))
    assert {finding.code for finding in health([tmp_path]).findings} == {"AMP723"}


def test_what_a_first_line_of_megatron_at_another_iteration_has_skipped_is_not_known(tmp_path):
    (tmp_path / "job.out").write_text(line_of_megatron(2001, 2.0**31, 1) + line_of_megatron(2002, 2.0**30, 1))
    assert [one.skipped for one in steps(read(tmp_path)[1])] == [None, True]


DEEPSPEED = """\
[2024-07-17 19:44:06,829] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. \
Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1
[2024-07-17 19:44:06,945] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. \
Attempted loss scale: 65536, reducing to 32768
[2024-07-17 19:44:16,945] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[0.001, 0.001], mom=[0.9]
[2024-07-17 19:44:26,945] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=2, lr=[0.0005], mom=[(0.9, 0.999)]
"""


def test_deepspeeds_lines(tmp_path):
    (tmp_path / "out.log").write_text(DEEPSPEED)
    kind, lines, _ = read(tmp_path)
    found = [(one.step, one.skipped, one.loss_scale, one.learning_rates) for one in steps(lines)]
    assert kind == "deepspeed"
    assert found == [
        (1, True, 65536.0, ()),
        (2, True, 65536.0, ()),
        (10, False, 32768.0, (0.001,)),
        (20, False, 32768.0, (0.0005,)),
    ]
    (run,) = health([tmp_path]).health.runs
    assert (run.steps, run.skipped, run.skip_share) == (4, 2, 2 / 20)


def test_what_is_no_log_is_refused_with_what_is_read(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing of a training\n")
    (tmp_path / "data.csv").write_text("step,price\n1,2.0\n")
    networks = (
        "step,train/g_loss,train/d_loss\n1,2.0,1.0\n"  # which train against each other: no sum of theirs is a loss
    )
    (tmp_path / "gan.csv").write_text(networks)
    for path in (tmp_path / "notes.txt", tmp_path / "data.csv", tmp_path / "gan.csv", tmp_path):
        with pytest.raises(CheckpointError, match=r"trainer_state\.json, metrics\.csv"):
            find_log(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        find_log(tmp_path / "gone")


@pytest.mark.parametrize(("suffix", "text"), [("csv", "step,loss\n1,2.0\n"), ("log", DEEPSPEED)])
def test_of_several_logs_in_a_folder_the_latest_is_read_and_the_others_are_named(tmp_path, suffix, text):
    for at, name in enumerate(("b-old", "c-older", "a-new")):
        path = tmp_path / f"{name}.{suffix}"
        path.write_text(text)
        os.utime(path, (1_700_000_000 + at, 1_700_000_000 + at))
    (tmp_path / f"z-notes.{suffix}").write_text("nothing of a training\n")
    found = find_log(tmp_path)
    assert found.names == (f"a-new.{suffix}",)
    assert [(one.what, one.reason) for one in found.skipped] == [
        *((f"{name}.{suffix}", f"another log than a-new.{suffix}") for name in ("c-older", "b-old")),
        (f"z-notes.{suffix}", "no log: it has no row with a step and a loss"),
    ]
    assert find_log(tmp_path / f"b-old.{suffix}").skipped == ()
