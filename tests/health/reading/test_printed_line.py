"""Single lines as programs print them: what of them is a number of the training, and where the loop stands."""

from __future__ import annotations

import math
from time import process_time

import pytest

from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.health.reading.printed_line import printed
from ampdoctor.workflows.health import health

LINES = {
    "step 99: loss 2.2049, scale 1024": {"step": 99, "loss": 2.2049, "loss_scale": 1024.0},
    "iter 100: loss 3.2000, time 12.50ms, mfu 4.32%": {"step": 100, "loss": 3.2, "seconds": 0.0125},
    "step 0: train loss 4.2874, val loss 4.2823": {"step": 0, "loss": 4.2874},
    "{'loss': 6.12, 'grad_norm': nan, 'learning_rate': 2.3e-07, 'epoch': 1.8}": {
        "loss": 6.12, "gradient_norm": math.nan, "learning_rate": 2.3e-07, "epoch": 1.8,
    },
    "{'loss': '2.1', 'grad_norm': 'inf', 'learning_rate': '5e-05', 'epoch': '0.5'}": {
        "loss": 2.1, "gradient_norm": math.inf, "learning_rate": 5e-05, "epoch": 0.5,
    },
    "2020-07-17 07:11:02 | INFO | train_inner | epoch 001:   2800 / 160368 loss=9.255, ppl=611.12, wps=57.3, "
    "num_updates=2800, lr=2.8e-05, gnorm=3.23, loss_scale=128, train_wall=13": {
        "step": 2800, "epoch": 1, "loss": 9.255, "gradient_norm": 3.23, "loss_scale": 128.0, "learning_rate": 2.8e-05,
    },
    '2020 | INFO | train_inner | {"epoch": 27, "update": 26.267, "loss": "8.206", "num_updates": "33700", '
    '"gnorm": "1.833"}': {"step": 33700, "epoch": 27, "loss": 8.206, "gradient_norm": 1.833},
    "04/21 21:03:53 - mmengine - INFO - Epoch(train) [2][10/90]  lr: 1.000e-02  eta: 1 day, 0:00:25  time: 0.010  "
    "data_time: 0.002  memory: 0  grad_norm: 2.5  loss: 11.4723  loss_cls: 1.0": {
        "step": 10, "epoch": 2, "loss": 11.4723, "gradient_norm": 2.5, "learning_rate": 0.01, "seconds": 0.01,
        "data_seconds": 0.002,
    },
    "[2024-07-27 03:32:50 vssm1] (main.py 295): INFO Train: [29/300][2670/2859]\teta 0:01:24 lr 0.000872\t wd 0.0500\t"
    "time 0.4283 (0.4481)\tloss 2.0148 (1.9972)\tgrad_norm 4.1605 (inf)\tloss_scale 32768.0000 (34681.8180)": {
        "step": 2670, "epoch": 29, "loss": 2.0148, "gradient_norm": 4.1605, "loss_scale": 32768.0,
        "learning_rate": 0.000872,
    },
    "[rank0]:\x1b[0m[titan] 2026-05-18 16:04:46,338 - root - INFO - \x1b[31mstep: 14  \x1b[32mloss:  3.24405  "
    "\x1b[38;2;1;2;3mgrad_norm:  0.8319  memory:  9.46GiB(64.99%)  tps: 7,282\x1b[0m": {
        "step": 14, "loss": 3.24405, "gradient_norm": 0.8319,
    },
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.303494": {"step": 640, "epoch": 1, "loss": 2.303494},
    "loss: 2.303494  [   64/60000]": {"step": 64, "loss": 2.303494},
    "Epoch: [0][  10/5005]\tTime  0.3 ( 0.4)\tLoss 6.9e+00 (7.0e+00)\tAcc@1 0.1 (0.2)": {
        "step": 10, "epoch": 0, "loss": 6.9,
    },
    "Train: 0 [  50/1251 (  4%)]  Loss: 6.91 (6.9)  Time: 0.3s  LR: 1.0e-06": {
        "step": 50, "epoch": 0, "loss": 6.91, "learning_rate": 1e-06,
    },
    "[1,  2000] loss: 2.173": {"step": 2000, "epoch": 1, "loss": 2.173},
    "[08/12 10:00:00 d2.utils.events]:  eta: 0:10:00  iter: 19  total_loss: 2.3  loss_cls: 1.1  lr: 0.001": {
        "step": 19, "loss": 2.3, "learning_rate": 0.001,
    },
    "Epoch 80:  67%|██████▋   | 10/15 [02:53<01:18, 15.76s/it, loss=0.429, v_num=1]": {
        "step": 10, "epoch": 80, "loss": 0.429,
    },
    "1|100|Loss: 2.3:  5%|▌ | 100/2000 [00:10<01:30,  9.9it/s]": {"step": 100, "loss": 2.3},
    "step    1/19560 | loss 10.951 (+nanz)| norm 15.33 (+nanz)| lr 1.2e-05 | 1012.33 ms": {
        "step": 1, "loss": 10.951, "gradient_norm": 15.33, "learning_rate": 1.2e-05,
    },
    "Training epoch 0, iteration 99/999 | global_batch_size: 8 | global_step: 99 | reduced_train_loss: 8.1": {
        "step": 99, "epoch": 0, "loss": 8.1,
    },
    "Epoch [2/5], Step [100/600], Loss: 0.2": {"step": 100, "epoch": 2, "loss": 0.2},
    "Loss at step 100: 2.3": {"step": 100, "loss": 2.3},
    "step 10 | loss tensor(-2.3012, device='cuda:0', grad_fn=<NllLossBackward>)": {"step": 10, "loss": -2.3012},
    "epoch 3 step 1,200 loss NaN scale 65,536.0 gnorm -Inf": {
        "step": 1200, "epoch": 3, "loss": math.nan, "loss_scale": 65536.0, "gradient_norm": -math.inf,
    },
}  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_a_line_of_a_training(line):
    wanted = dict(LINES[line])
    said = printed(line.encode())
    assert (said.step, said.epoch) == (wanted.pop("step", None), wanted.pop("epoch", None))
    found = {name: number.value for name, number in said.numbers.items()}
    assert found.keys() == wanted.keys()
    assert all(found[name] == wanted[name] or math.isnan(wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "line",
    [
        "2020 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.9 | ppl 955 | num_updates 1000",
        "04/21 21:03:53 - mmengine - INFO - Epoch(val) [1][90/90]    loss: 3.3 coco/bbox_mAP: 0.1",
        "validation loss at iteration 2 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 |",
        "Validation: 50%|█████     | 2/4 [00:01<00:01, 15.76it/s, loss=0.4]",
        "{'eval_loss': 2.4, 'eval_runtime': 0.1, 'epoch': 1.0}",
        "step 5: box loss 2.0, kl_loss 1.0",
    ],
)
def test_the_loss_of_an_evaluation_or_of_a_part_is_none_of_the_training(line):
    said = printed(line.encode())
    assert said is None or not said.numbers


@pytest.mark.parametrize(
    "line",
    [
        "At step 500 we saw the loss jump: loss 3.4, so the lr is 1e-4.",
        "The loss of 2.1 at epoch 3/10, see page 5.",
        "Table 4 compares step 100 (loss 2.2) with step 200 (loss 2.1); both are from the paper.",
        "INFO - Saving the model of the best loss to /x at step 500",
    ],
)
def test_a_sentence_with_numbers_is_no_line_of_a_training(line):
    said = printed(line.encode())
    assert said is None or "loss" not in said.numbers or said.step is None


@pytest.mark.parametrize(
    ("prefix", "rank"), [("[rank3]: ", 3), ("3: ", 3), ("[default3]:", 3), ("[1,3]<stdout>:", 3), ("", 0)]
)
def test_the_process_that_prints_a_line(prefix, rank):
    said = printed(f"{prefix}step 10 loss 2.0".encode())
    assert (said.rank, said.step, said.numbers["loss"].value) == (rank, 10, 2.0)


def test_a_line_that_is_made_to_take_long_takes_none():
    began = process_time()
    for text in ("loss " * 3000, "a" * 16000 + " loss", "1%|" * 5000 + "loss", "loss" + "[1" * 7000, "loss 1," * 2300):
        printed(text.encode())
        printed(text.encode()[: 16 * 1024])
    assert process_time() - began < 2.0


@pytest.mark.parametrize(
    "line",
    [
        "step " + "9" * 5000 + ": loss 2.0",
        "epoch nan step nan loss 2.0",
        "step -5 epoch -1 loss 2.0",
        "50%|x| " + "9" * 5000 + "/5 [00:01<00:01, 2it/s, loss=2.0]",
    ],
)
def test_a_number_that_is_no_step_and_no_epoch_is_none(line):
    said = printed(line.encode())
    assert said is None or (said.epoch is None and (said.step is None or 0 <= said.step < 10**16))


# -- how a job ended --


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
