"""Training logs beside the weights: metrics.csv, JSON lines, and what else may lie under such a name."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints import log_files
from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.health.reading.log_files import MAX_LINE, read_log
from ampdoctor.workflows.scan import scan


def read(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with RegularFile(tmp_path / name, name) as file:
        return read_log(file)


def entry(step, loss=None, norm=None, scale=None, rate=None):
    return LogEntry(step=step, loss=loss, grad_norm=norm, scale=scale, learning_rate=rate)


def test_lightnings_csv_has_rows_of_one_step_that_belong_together(tmp_path):
    text = "epoch,lr-AdamW,step,train_loss,val_loss,grad_norm\n0,,9,0.5,,\n0,,9,,0.7,2.5\n0,0.01,19,0.25,,nan\n"
    assert repr(read(tmp_path, "metrics.csv", text)) == repr((entry(9, 0.5, 2.5), entry(19, 0.25, math.nan, rate=0.01)))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("step,train_loss_epoch,train_loss_step", (entry(8, 0.25), entry(9, 0.125))),
        ("step,train_loss_epoch,other", (entry(9, 0.5),)),
    ],
)
def test_the_mean_of_an_epoch_stands_in_for_no_step_of_which_there_is_a_loss(tmp_path, columns, expected):
    assert read(tmp_path, "metrics.csv", f"{columns}\n8,,0.25\n9,,0.125\n9,0.5,\n") == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"step": 3, "loss": 1.5, "grad_norm": "nan", "lr": 0.1}, entry(3, 1.5, math.nan, rate=0.1)),
        ({"global_step": 3, "train/loss": 1.5, "train/loss_scale": 1024}, entry(3, 1.5, scale=1024.0)),
        ({"iteration": 3, "lm loss": 1.5, "grad-norm": 2, "loss_scale": 8}, entry(3, 1.5, 2.0, 8.0)),
        ({"num_updates": "3", "loss": "1.5", "gnorm": "0.5", "train_loss": 9}, entry(3, 1.5, 0.5)),
        ({"step": 3.0, "loss": 1e400}, entry(3, math.inf)),
    ],
)
def test_columns_have_the_names_that_trainers_give_them(tmp_path, row, expected):
    assert repr(read(tmp_path, "log.jsonl", json.dumps(row))) == repr((expected,))


@pytest.mark.parametrize(
    "row",
    [
        {"step": 3, "eval/loss": 1.5, "val_loss": 2},
        {"loss": 1.5},
        {"step": 3},
        {"step": -1, "loss": 1.5},
        {"step": 2.5, "loss": 1.5},
        {"step": True, "loss": 1.5},
        {"step": math.nan, "loss": 1.5},
        {"step": 9, "train_loss": 0.3, "train_runtime": 12.0},  # the Trainer's summary of the run
        [{"step": 3, "loss": 1.5}],
        {"step": [3], "loss": {"a": 1}},
    ],
)
def test_what_is_no_line_of_a_training_log_is_passed_over(tmp_path, row):
    assert read(tmp_path, "log.jsonl", json.dumps(row)) == ()


def test_a_restart_drops_what_it_undid(tmp_path):
    steps = [10, 20, 30, 20, 30, 40]
    text = "\n".join(json.dumps({"step": s, "loss": i}) for i, s in enumerate(steps))
    assert [(e.step, e.loss) for e in read(tmp_path, "log.txt", text)] == [(10, 0.0), (20, 3.0), (30, 4.0), (40, 5.0)]


def test_a_line_that_comes_late_restarts_nothing(tmp_path):
    rows = [{"step": 1, "loss": 3}, {"step": 2, "loss": 2}, {"step": 1, "grad_norm": 5}, {"step": 3, "loss": 1}]
    text = "\n".join(json.dumps(row) for row in [*rows, {"step": 2, "grad_norm": 4, "loss": 2}])
    assert read(tmp_path, "log.jsonl", text) == (entry(1, 3.0, 5.0), entry(2, 2.0, 4.0), entry(3, 1.0))
    again = text + "\n" + json.dumps({"step": 2, "loss": 9})  # another loss: the run went back
    assert read(tmp_path, "log.jsonl", again) == (entry(1, 3.0, 5.0), entry(2, 9.0, 4.0))


HOSTILE = {
    "deep.jsonl": "[" * 100_000 + "\n" + '{"a":' * 100_000 + "\n",
    "line.jsonl": '{"step": 1, "loss": "' + "9" * (MAX_LINE + 9) + '"}\n',
    "digits.jsonl": '{"step": 1, "loss": ' + "9" * 5000 + "}\n",
    "bytes.jsonl": bytes(range(256)) * 50,
    "wide.csv": "",
    "half.jsonl": '{"step": 7, "loss": 1.0}\n{"step": 8, "lo',
}


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.endswith("jsonl")])
def test_hostile_and_broken_lines_give_nothing(tmp_path, name):
    assert read(tmp_path, name, HOSTILE[name]) == ((entry(7, 1.0),) if name == "half.jsonl" else ())


def test_a_hostile_table_gives_nothing(tmp_path):
    with pytest.raises(LimitExceededError, match="columns of a table"):
        read(tmp_path, "metrics.csv", ",".join(["step"] * 20_000) + "\n1\n")
    assert read(tmp_path, "metrics.csv", 'step,loss\n1,"' + "9" * 200_000 + '"\n') == ()
    assert read(tmp_path, "metrics.csv", "\0,step\n") == ()


def test_the_last_row_of_a_table_counts_once_its_line_has_an_end(tmp_path):
    text = "step,grad_norm\n1,9.1e-05\n2,9.1e-0"
    assert read(tmp_path, "metrics.csv", text) == (entry(1, norm=9.1e-05),)
    assert read(tmp_path, "metrics.csv", text + "5\n") == (entry(1, norm=9.1e-05), entry(2, norm=9.1e-05))


def test_a_stray_quote_and_a_huge_cell_cost_no_more_than_the_lines_that_they_take(tmp_path):
    rows = "".join(f"{step},1.0\n" for step in range(500))
    quoted = read(tmp_path, "metrics.csv", 'step,loss\n"0,1.0\n' + rows)
    assert [one.step for one in quoted] == list(range(log_files.MAX_LINES_OF_A_ROW - 1, 500))
    huge = read(tmp_path, "metrics.csv", 'step,loss\n1,"' + "x" * 200_000 + '"\n' + rows)
    assert [one.step for one in huge] == list(range(500))


def test_a_text_of_several_lines_in_quotes_is_one_cell(tmp_path):
    text = 'step,sample,loss\n1,"a ""first"",\nand a second, line",2.0\n2,short,1.0\n'
    assert read(tmp_path, "metrics.csv", text) == (entry(1, 2.0), entry(2, 1.0))


@pytest.mark.parametrize(
    ("name", "text"),
    [("metrics.csv", "step,loss\n1,2.0\n"), ("log.jsonl", '{"step": 1, "loss": 2.0}\n')],
)
def test_a_byte_order_mark_is_no_part_of_a_log(tmp_path, name, text):
    assert read(tmp_path, name, b"\xef\xbb\xbf" + text.encode()) == (entry(1, 2.0),)


def test_a_file_beyond_the_limit_is_no_log(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 100)
    with pytest.raises(LimitExceededError, match="bytes of a log"):
        read(tmp_path, "train.jsonl", '{"step": 1, "loss": 2}\n' * 50)
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    report = scan(tmp_path)
    assert (report.verdict, report.complete) == ("healthy", True)
    assert [s.what for s in report.skipped] == ["train.jsonl"]


def test_a_very_long_log_is_thinned_out_evenly_with_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files.thinned, "__defaults__", (1000,))
    rows = ["step,loss,val_loss", *(f"{i},{i % 7},\n{i},,1" for i in range(20_000))]
    steps = [e.step for e in read(tmp_path, "metrics.csv", "\r\n".join(rows)) if e.loss is not None]
    assert 200 < len(steps) <= 1001
    assert min(steps) == 0
    assert max(steps) > 19_800
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps) < 6 * len(rows) / len(steps)
    text = "".join(json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(20_000))
    entries = read(tmp_path, "log.jsonl", text)
    assert (entries[0].step, entries[-1].step) == (0, 19_999)
    assert 500 <= len(entries) <= 1001


@pytest.mark.parametrize("limit", [1, 2, 50])
def test_wide_lines_are_fewer(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(log_files, "MAX_CELLS", 10 * limit)
    text = "".join(json.dumps({"step": i, "loss": 1.0} | {f"c{j}": 1 for j in range(98)}) + "\n" for i in range(300))
    steps = [e.step for e in read(tmp_path, "log.jsonl", text)]
    assert len(steps) <= limit + 1
    assert steps[-1] == 299


def test_the_trainers_own_log_counts_before_a_longer_one(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    state = {"global_step": 5, "log_history": [{"step": 5, "loss": math.nan}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    for name in ("a.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"step": {i}, "loss": 1}}\n' for i in range(60)))
    with open_checkpoint(tmp_path) as checkpoint:
        assert repr(checkpoint.log) == repr((entry(5, math.nan),))


def test_the_longest_log_of_a_folder_is_taken_and_the_trainers_own_before_all(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.4\n")
    (tmp_path / "data.jsonl").write_text('{"text": "a sentence", "label": 3}\n' * 9)
    (tmp_path / "logs.jsonl").mkdir()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.log == (entry(1, 0.5), entry(2, 0.4))
    state = {"global_step": 5, "log_history": [{"step": 5, "loss": 0.1, "loss_scale": 64.0}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.log == (entry(5, 0.1, scale=64.0),)


def test_a_link_to_nothing_is_left_out_with_its_reason(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "nothing")
    report = scan(tmp_path)
    assert [(s.what, "link to nothing" in s.reason) for s in report.skipped] == [("metrics.csv", True)]
