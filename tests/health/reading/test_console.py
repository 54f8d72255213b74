"""A job's output as a log: which of its lines are the training's, and of which step each of them is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading import log_kind
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health

PUBLIC = Path(__file__).parents[3] / "fixtures" / "public"


def read(path):
    noticed = ReadIssues()
    lines = [one for one in find_log(path).lines(noticed) if isinstance(one.line, StepLine)]
    return [one.line for one in lines], noticed, [one.stamp.attempt for one in lines]


def steps_of(tmp_path, text, name="job.out"):
    (tmp_path / name).write_text(text)
    return [(one.step, one.loss) for one in read(tmp_path)[0]]


def loss(step):
    return round(2.0 + 4.0 / (1 + step / 50), 4)


def test_the_losses_of_an_evaluation_that_stand_beside_those_of_steps_are_not_read(tmp_path):
    text = "number of parameters: 10.65M\n"
    for step in range(100):
        if step % 50 == 0:
            text += f"step {step}: train loss 9.0, val loss 9.1\nsaving checkpoint to out\n"
        text += f"iter {step}: loss {loss(step)}, time 12.00ms, mfu 4.32%\n"
    assert steps_of(tmp_path, text) == [(step, loss(step)) for step in range(100)]
    assert read(tmp_path)[1].order.lost == 0


def test_losses_of_an_evaluation_are_read_where_there_are_no_others(tmp_path):
    text = "".join(f"step {step}: train loss {loss(step)}, val loss 9.1\n" for step in range(0, 500, 50))
    assert steps_of(tmp_path, text) == [(step, loss(step)) for step in range(0, 500, 50)]


def bar(at, of, text=""):
    return f"\r {100 * at // of:2}%|███       | {at}/{of} [00:10<13:48, 15.34s/it{text}]"


def printed_by_the_trainer(every, *, quoted=False):
    text = ""
    for step in range(1, 501):
        text += bar(step, 500)
        if step % every == 0:
            row = {"loss": loss(step), "grad_norm": math.nan if step == 40 else 1.5, "epoch": round(step / 250, 2)}
            row = {name: f"{value}" for name, value in row.items()} if quoted else row
            text += f"\r{' ' * 60}\r{row}\n{bar(step, 500)}"
        if step % 250 == 0:
            text += "".join(f"{bar(at, 50)}\x1b[A" for at in range(5)) + "\n{'eval_loss': 9.0, 'epoch': 1.0}\n"
    return text + "\n{'train_runtime': 12.0, 'train_loss': 2.5, 'epoch': 2.0}\n"


@pytest.mark.parametrize("quoted", [False, True])
def test_a_printed_dictionary_is_of_the_step_at_which_the_bar_beside_it_stands(tmp_path, quoted):
    text = printed_by_the_trainer(20, quoted=quoted)
    assert steps_of(tmp_path, text) == [(step, loss(step)) for step in range(20, 501, 20)]
    assert [step.step for step in read(tmp_path)[0] if math.isnan(step.gradient_norm)] == [40]
    assert read(tmp_path)[1].skipped == []


def test_printed_dictionaries_without_bars_are_counted_and_the_report_says_so(tmp_path):
    text = "".join(line + "\n" for line in printed_by_the_trainer(20).replace("\r", "\n").split("\n") if "{" in line)
    assert steps_of(tmp_path, text) == [(at, loss(20 * at)) for at in range(1, 26)]
    assert [one.what for one in health([tmp_path]).skipped] == ["the numbers of the steps"]


def test_the_means_of_epochs_are_read_where_there_is_nothing_finer(tmp_path):
    def of_an_epoch(epoch):
        end = f"| num_updates {500 * epoch} | lr 0.1 | gnorm 2.2 | loss_scale 8\n"
        valid = (
            f"1 | INFO | valid | epoch {epoch:03d} | valid on 'valid' subset | loss 9.9 | num_updates {500 * epoch}\n"
        )
        return f"1 | INFO | train | epoch {epoch:03d} | loss {loss(epoch)} | ppl 120 {end}{valid}"

    def of_a_step(epoch, step):
        return f"1 | INFO | train_inner | epoch {epoch:03d}: {step % 500} / 500 loss={loss(step)}, num_updates={step}\n"

    epochs = [of_an_epoch(epoch) for epoch in range(1, 4)]
    assert steps_of(tmp_path, "".join(epochs)) == [(500 * epoch, loss(epoch)) for epoch in range(1, 4)]
    inner = [
        "".join(of_a_step(at // 500 + 1, at) for at in range(500 * one + 50, 500 * one + 500, 50)) for one in range(3)
    ]
    assert steps_of(tmp_path, "".join(a + b for a, b in zip(inner, epochs, strict=True))) == [
        (at, loss(at)) for at in range(50, 1500, 50) if at % 500
    ]


@pytest.mark.parametrize(
    "line",
    [
        "04/21 21:03:53 - mmengine - INFO - Epoch(train)  [{epoch}][{at:3d}/90]  lr: 1.0e-02  eta: 0:25  loss: {loss}",
        "Train Epoch: {epoch} [{at}/90 (12%)]\tLoss: {loss}",
        "[{epoch}, {at:5d}] loss: {loss}",
        "Epoch {epoch}:  67%|██████▋   | {at}/90 [00:53<00:18, 15.76s/it, loss={loss}, v_num=1]",
    ],
)
def test_steps_that_are_counted_anew_in_each_epoch_go_on(tmp_path, line):
    text = "".join(
        line.format(epoch=1 + (at - 1) // 90, at=(at - 1) % 90 + 1, loss=loss(at))
        + "\nEpoch(val) [1][9/9]  loss: 9.0\n"
        for at in range(10, 361, 10)
    )
    assert steps_of(tmp_path, text) == [(at, loss(at)) for at in range(10, 361, 10)]
    assert set(read(tmp_path)[2]) == {0}


def test_a_bar_that_is_drawn_twice_at_each_step_and_begins_anew_in_each_epoch(tmp_path):
    text, before = "", 9.0
    for at in range(1, 201):
        place, epoch = (at - 1) % 50 + 1, (at - 1) // 50
        for shown in (before, loss(at)):  # update() draws it with the loss of the step before, set_postfix() anew
            text += f"\rEpoch {epoch}: " + bar(place, 50, f", loss={shown}")[1:]
        before = loss(at)
        text += "\n" if place == 50 else ""
    assert steps_of(tmp_path, text) == [(at, loss(at)) for at in range(1, 201)]
    _, noticed, attempts = read(tmp_path)
    assert (set(attempts), noticed.order.lost) == ({0}, 0)


def test_the_epoch_may_stand_in_a_line_of_its_own(tmp_path):
    text = ""
    for epoch in range(1, 4):
        text += f"Epoch {epoch}\n-------------\n"
        text += "".join(f"loss: {loss(epoch * 10 + at):>7f}  [{64 + at * 640:>5d}/6400]\n" for at in range(10))
        text += "Test Error: \n Accuracy: 44.5%, Avg loss: 2.155 \n\n"
    found = steps_of(tmp_path, text)
    assert [step for step, _ in found] == [6400 * epoch + 64 + 640 * at for epoch in range(3) for at in range(10)]


def test_where_there_is_nothing_but_epochs_an_epoch_is_a_step(tmp_path):
    text = "".join(f"Epoch {at}/50, train loss: {loss(at)}, val loss: 9.0, val acc: 0.9\n" for at in range(1, 51))
    assert steps_of(tmp_path, text) == [(at, loss(at)) for at in range(1, 51)]


def test_a_run_that_was_started_again_in_the_same_file_is_the_next_attempt(tmp_path):
    first = "".join(f"epoch {at // 50} step {at % 50}: loss {loss(at)}\n" for at in range(150))
    again = "".join(f"epoch {at // 50} step {at % 50}: loss {loss(at)}\n" for at in range(100, 200))
    (tmp_path / "job.out").write_text(first + "loading the checkpoint\n" + again)
    lines, _, attempts = read(tmp_path)
    assert [line.step for line in lines] == [*range(150), *range(100, 200)]
    assert attempts == [0] * 150 + [1] * 100


@pytest.mark.parametrize(("form", "ranks"), [("[rank{}]: ", (1, 0, 2)), ("{}: ", (2, 0, 1)), ("{}: ", (7,))])
def test_of_several_processes_the_first_that_prints_steps_is_read(tmp_path, form, ranks):
    text = "".join(
        form.format(rank) + f"step {at:,} | loss {loss(at) + rank} | grad norm: 1.5\n"
        for at in range(990, 1100)
        for rank in ranks
    )
    assert steps_of(tmp_path, text) == [(at, loss(at) + min(ranks)) for at in range(990, 1100)]


def overflow(at, scale, to):
    clock = f"{10 + at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d},456"
    return (
        f"[2023-06-07 {clock}] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
        f"Attempted loss scale: {scale}, reducing to {to}\n"
    )


def test_overflows_of_deepspeed_stand_between_the_steps_that_something_else_prints(tmp_path):
    text = ""
    for step in range(1, 41):
        text += overflow(step, 2 ** (20 - step), 2 ** (19 - step)) if step <= 3 else ""
        text += bar(step, 40)
        text += f"\r{ {'loss': loss(step), 'grad_norm': 1.5} }\n{bar(step, 40)}" if step % 2 == 0 else ""
    (tmp_path / "job.out").write_text(text)
    lines, _, attempts = read(tmp_path)
    assert [(one.step, one.skipped, one.loss_scale, one.loss) for one in lines[:4]] == [
        (1, True, 2.0**19, None),
        (2, True, 2.0**18, loss(2)),
        (3, True, 2.0**17, None),
        (4, False, 2.0**16, loss(4)),
    ]
    assert (lines[-1].step, set(attempts)) == (40, {0})


def test_a_log_with_nothing_but_overflows_says_that_steps_were_taken_in_between(tmp_path):
    settling = "".join(overflow(2 * at, 2 ** (31 - at), 2 ** (30 - at)) for at in range(16))
    later = "".join(overflow(32 + 2000 * at, 2**16, 2**15) for at in range(1, 5))
    (tmp_path / "job.out").write_text(settling + later)
    lines, noticed, _ = read(tmp_path)
    assert [one.skipped for one in lines] == [True] * 16 + [False, True] * 4
    assert [one.step for one in lines[15::2]] == pytest.approx([16, 1017, 2017, 3017, 4017], abs=2)
    assert [one.what for one in noticed.skipped] == ["steps that were taken"]


def dictionaries(first, last):
    return "".join(f"{ {'loss': loss(at), 'grad_norm': 1.5, 'epoch': at / 100} }\n" for at in range(first, last + 1))


def test_overflows_behind_the_last_counted_row_are_steps_to_the_floor_and_no_healthy_run(tmp_path):
    falls = "".join(overflow(2 * at, 2 ** (6 - at), max(2 ** (5 - at), 1)) for at in range(7))
    end = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    end += "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"
    (tmp_path / "job.out").write_text(dictionaries(1, 40) + falls + end)
    lines, noticed, _ = read(tmp_path)
    assert [(one.step, one.skipped, one.loss_scale) for one in lines[40:]] == [
        (41 + at, True, 2.0 ** (6 - at)) for at in range(7)
    ]
    assert [one.what for one in noticed.skipped] == ["the numbers of the steps"]
    report = health([tmp_path])
    assert (report.verdict, [one.code for one in report.findings if one.severity == "error"]) == ("sick", ["AMP723"])


def test_overflows_far_apart_behind_the_last_counted_row_are_not_in_a_row(tmp_path):
    apart = "".join(overflow(at, 2**14 // scale, 2**13 // scale) for at, scale in ((0, 1), (2, 2), (900, 4), (1800, 8)))
    (tmp_path / "job.out").write_text(dictionaries(1, 40) + apart)
    assert [one.skipped for one in read(tmp_path)[0][40:]] == [True, True, False, True, False, True]
    assert health([tmp_path]).verdict != "sick"


def apex(to):
    return f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {to!r}\n"


def fairseq(to):
    return (
        "2024-05-18 10:00:00 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, "
        f"setting loss scale to: {to}\n"
    )


def scale_at(number, first=2.0**16, floor=1.0):
    return max(first * 0.5**number, floor)


SAID = {
    "deepspeed": lambda at: overflow(2 * at, scale_at(at), scale_at(at + 1)),
    "apex": lambda at: apex(scale_at(at + 1)),
    "fairseq": lambda at: fairseq(scale_at(at + 1)),
}
LINES = {
    "dictionaries": lambda at: dictionaries(at, at),
    "epochs": lambda at: f"Epoch {at}: loss {loss(at)}, grad_norm 1.5\n",
    "steps": lambda at: f"step {at}: loss {loss(at)}\n",
}


def overflows_in(tmp_path, text):
    """Returns the report of a job's output, and what its checks of the steps and the loss scale say."""
    (tmp_path / "job.out").write_text(text)
    report = health([tmp_path / "job.out"])
    checks = {check.name: check.result for check in report.checks}
    return report, (checks["steps"], checks["loss scale"])


def errors(report):
    return {one.code for one in report.findings if one.severity == "error"}


@pytest.mark.parametrize(
    ("said", "line", "each"),
    [
        ("deepspeed", "dictionaries", 1),
        ("deepspeed", "epochs", 5),
        ("deepspeed", "steps", 1),
        ("apex", "steps", 1),
        ("fairseq", "dictionaries", 1),
    ],
)
def test_every_step_overflows_down_to_the_floor(tmp_path, said, line, each):
    text = "".join(
        "".join(SAID[said](each * at + more) for more in range(each)) + LINES[line](at + 1) for at in range(40)
    )
    report, checks = overflows_in(tmp_path, text)
    assert (report.verdict, errors(report)) == ("sick", {"AMP723", "AMP740"})
    assert checks == ("found", "found")


@pytest.mark.parametrize("line", ["dictionaries", "epochs", "steps"])
def test_a_scale_that_falls_to_its_floor_late(tmp_path, line):
    text = "".join(
        (overflow(2 * at, scale_at(at - 40, 256.0), scale_at(at - 39, 256.0)) if at >= 40 else "") + LINES[line](at + 1)
        for at in range(80)
    )
    report, checks = overflows_in(tmp_path, text)
    assert ("AMP723" in errors(report), checks[1]) == (True, "found")


def test_few_steps_that_are_all_skipped_are_an_error_where_nothing_is_left_to_scale(tmp_path):
    text = "".join(apex(2.0 ** (15 - at)) + dictionaries(at, at) for at in range(1, 26))
    assert errors(overflows_in(tmp_path, text)[0]) == {"AMP740"}
    settling = "".join(apex(2.0 ** (31 - at)) + dictionaries(at, at) for at in range(1, 26))
    assert overflows_in(tmp_path, settling)[0].verdict == "not_judged"


@pytest.mark.parametrize("said", ["deepspeed", "apex"])
@pytest.mark.parametrize(("line", "each"), [("dictionaries", 1), ("dictionaries", 10), ("epochs", 100)])
def test_a_scaler_that_settles_and_probes_between_lines_is_healthy(tmp_path, said, line, each):
    """It starts too high, and goes one up and down again about each two thousand steps."""
    text, scale, tried = "", 2.0**22, 0
    for at in range(1, 161):
        for _ in range(each):
            tried += 1
            if tried <= 6:
                text += overflow(2 * tried, scale, scale / 2) if said == "deepspeed" else apex(scale / 2)
                scale /= 2
            elif tried % (2000 if each > 1 else 40) == 0:
                text += overflow(2 * tried, 2 * scale, scale) if said == "deepspeed" else apex(scale)
        text += LINES[line](at)
    report, checks = overflows_in(tmp_path, text)
    assert (report.verdict, report.findings) == ("healthy", ())
    assert [check.startswith("not judged: which") for check in checks] == [True, True]


def test_skipped_steps_that_a_count_leaves_out_have_no_step(tmp_path):
    """A loop that counts the steps that it takes: three are skipped between the fifth and the sixth."""
    text = "".join("".join(map(apex, (4.0, 2.0, 1.0))) * (at == 6) + LINES["steps"](at) for at in range(1, 81))
    report, checks = overflows_in(tmp_path, text)
    assert (report.findings, checks[0]) == ((), "not judged: which 3 steps were skipped is not known")
    assert set(read(tmp_path)[2]) == {0}


def test_text_that_is_no_log_is_not_taken_for_one(tmp_path):
    texts = (
        "At step 500 we saw the loss jump: loss 3.4.\nAt step 900, the loss was 2.1 again.\n",
        "for step in range(100):\n    loss = 2.0\n    if step == 3: loss = 0.5\nstep = 5\n",
        "lr: 0.001\nsteps: 1000\nloss_scale: 128\nepoch: 100\n",
        "step 5: loss 2.0, as an example\n" + "and other words\n" * 20,
        "\n".join(f"{at}/100 files copied, {at} skipped" for at in range(50)),
        "\n".join(f"epoch {at}: accuracy {at / 100}" for at in range(50)),
    )
    for text in texts:
        (tmp_path / "notes.txt").write_text(text)
        for path in (tmp_path, tmp_path / "notes.txt"):
            with pytest.raises(CheckpointError, match="no log that is read here"):
                find_log(path)


def test_a_folder_of_a_thousand_outputs_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(log_kind, "LOOKED_THROUGH", 200_000)
    monkeypatch.setattr(log_kind.Budget.__init__, "__defaults__", (200_000, *log_kind.Budget.__init__.__defaults__[1:]))
    for at in range(40):
        (tmp_path / f"job{at}.out").write_text("waiting for a machine\n" * 2000)
    count, whole = [], RegularFile.read_into

    def counted(self, offset, target):
        count.append(len(target))
        whole(self, offset, target)

    monkeypatch.setattr(RegularFile, "read_into", counted)
    with pytest.raises(CheckpointError, match="35 of its files were not looked through"):
        find_log(tmp_path)
    assert sum(count) < 500_000 + 8 * 64 * 1024
    (tmp_path / "z.out").write_text("step 1: loss 2.0\nstep 2: loss 1.9\n")
    assert find_log(tmp_path).names == ("z.out",)


def test_json_lines_that_are_called_json_are_a_table_in_a_folder_too():
    for path in ("", "vis_data", "vis_data/scalars.json"):
        found = find_log(PUBLIC / "scalars_json_note" / "20240518_063801" / path)
        assert (found.kind.format, found.names, found.skipped) == ("table", ("scalars.json",), ())


def test_rows_of_an_evaluation_and_iterations_of_an_epoch_in_json_lines(tmp_path):
    rows = ['{"env_info": "x", "exp_name": "y"}']
    for at in range(50, 2001, 50):
        epoch, iteration = 1 + (at - 1) // 500, (at - 1) % 500 + 1
        rows.append(f'{{"mode": "train", "epoch": {epoch}, "iter": {iteration}, "loss": {loss(at)}}}')
        if iteration == 500:
            rows.append(f'{{"mode": "val", "epoch": {epoch}, "iter": 40, "loss": 9.0, "bbox_mAP": 0.1}}')
    found = steps_of(tmp_path, "\n".join(rows) + "\n", "20200508.log.json")
    assert found == [(at, loss(at)) for at in range(50, 2001, 50)]


def test_a_table_of_epochs_whose_loss_has_parts(tmp_path):
    header = "epoch,   train/box_loss,   train/cls_loss,  metrics/precision(B),   val/box_loss,  lr/pg0"
    rows = [f"{at},   {loss(at)},  1.5,  0.9,  9.0,  {'nan' if at == 3 else 0.01}" for at in range(1, 31)]
    (tmp_path / "runs" / "detect" / "train").mkdir(parents=True)
    (tmp_path / "runs" / "detect" / "train" / "results.csv").write_text("\n".join([header, *rows]) + "\n")
    for path in (tmp_path, tmp_path / "runs", tmp_path / "runs" / "detect" / "train" / "results.csv"):
        lines, _, _ = read(path)
        assert [(one.step, one.loss) for one in lines] == [(at, pytest.approx(loss(at) + 1.5)) for at in range(1, 31)]
        assert lines[0].learning_rates == (0.01,)


def test_epochs_that_are_no_whole_numbers_are_no_steps(tmp_path):
    rows = [f'{{"epoch": {at / 4}, "loss": {loss(at)}}}\n' for at in range(1, 31)]
    (tmp_path / "log.jsonl").write_text("".join(rows))
    lines, noticed, _ = read(tmp_path)
    assert [(one.step, one.loss) for one in lines] == [(at, loss(at)) for at in range(1, 31)]
    assert [one.what for one in noticed.skipped] == ["the numbers of the steps"]
