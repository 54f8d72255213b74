"""TensorBoard's event files as a log: what its own writer wrote, what is cut off, damaged or made to harm."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.files import list_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading.event_files import masked_crc
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import logs_in_folder
from ampdoctor.workflows.scan import scan

FIXTURE = Path(__file__).parents[3] / "fixtures" / "logs" / "tensorboard"
WRITTEN = json.loads((FIXTURE / "written.json").read_text(encoding="utf-8"))
NAME = "events.out.tfevents.1700000000.host.1.0"


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number, value):
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3) + varint(value)


def single(number, value):
    return varint(number << 3 | 5) + struct.pack("<f", value)


def scalar(tag, value):
    return field(1, field(1, tag.encode()) + single(2, value))


def event(step, tag="loss", value=1.0, wall=None):
    return field(1, 1e9 + step if wall is None else wall) + field(2, step) + field(5, scalar(tag, value))


def record(data):
    head = struct.pack("<Q", len(data))
    return head + masked_crc(head).to_bytes(4, "little") + data + masked_crc(data).to_bytes(4, "little")


def read(tmp_path, *contents):
    """The log of these contents, each a file of its own."""
    for index, content in enumerate(contents):
        (tmp_path / f"{NAME}{index}").write_bytes(content)
    return steps_in(tmp_path)


def steps_in(folder):
    """The steps that stand in a folder's event files, and what was skipped."""
    logs, refused = logs_in_folder(list_folder(folder))
    noticed, steps = ReadIssues(), {}
    for log in logs:
        attempt = 0
        for whole in log.lines(noticed):
            if isinstance(whole.line, StepLine):
                if whole.stamp.attempt > attempt:
                    attempt = whole.stamp.attempt
                    steps = {at: line for at, line in steps.items() if at < whole.line.step}
                steps[whole.line.step] = whole.line
    return list(steps.values()), [*noticed.skipped, *refused]


def losses(log):
    return [(line.step, line.loss) for line in log]


def test_the_log_is_what_the_writer_was_given():
    log, skipped = steps_in(FIXTURE)
    assert skipped == []
    names = {"loss": "loss", "grad_norm": "gradient_norm", "scale": "loss_scale"}
    for line, (step, values) in zip(log, WRITTEN.items(), strict=True):
        assert line.step == int(step)
        assert {name: getattr(line, names[name]) for name in values if name in names} == pytest.approx(
            {name: value for name, value in values.items() if name in names}, nan_ok=True
        )


def test_the_installed_writers_files_are_read(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(40):
            writer.add_scalar("train/loss", 1 / (step + 1), step)
            writer.add_scalar("grad_norm", math.inf if step == 9 else 0.5, step)
    log, skipped = steps_in(tmp_path)
    assert skipped == []
    assert [line.loss for line in log] == pytest.approx([1 / (step + 1) for step in range(40)])
    assert [line.step for line in log if line.gradient_norm == math.inf] == [9]


@pytest.mark.parametrize("cut", [1, 13])
def test_a_record_that_is_still_being_written_is_no_error(tmp_path, cut):
    whole = record(event(1)) + record(event(2))
    assert (losses(read(tmp_path, whole[:-cut])[0]), read(tmp_path, whole[:-cut])[1]) == ([(1, 1.0)], [])


@pytest.mark.parametrize("at", [3, 9, 15])
def test_a_damaged_record_ends_the_file_and_is_told(tmp_path, at):
    records = [bytearray(record(event(step))) for step in range(4)]
    records[2][at] ^= 0x10
    log, skipped = read(tmp_path, b"".join(records))
    assert losses(log) == [(0, 1.0), (1, 1.0)]
    told = f"not read past byte {len(records[0]) + len(records[1])}: that record is damaged"
    assert [(s.what, s.reason) for s in skipped] == [(f"{NAME}0", told)]


def test_a_restart_undoes_the_steps_that_it_repeats_also_from_a_file_that_is_named_before(tmp_path):
    first = b"".join(record(event(step, value=1.0, wall=2000.0 + step)) for step in range(6))
    second = b"".join(record(event(step, value=2.0, wall=1000.0 + step)) for step in range(4))
    assert losses(read(tmp_path, first, second)[0]) == [(step, 1.0) for step in range(6)]
    late = b"".join(record(event(step, value=3.0, wall=3000.0 + step)) for step in (3, 4))
    assert losses(read(tmp_path, first, second, late)[0]) == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)]


def test_two_writers_of_one_run_add_to_each_other(tmp_path):
    loss = b"".join(record(event(step, "train/loss", 2.0)) for step in range(9))
    scale = b"".join(record(event(step, "amp/scale", 512.0)) for step in range(9))
    log, _ = read(tmp_path, loss, scale)
    assert [(line.loss, line.loss_scale) for line in log] == [(2.0, 512.0)] * 9


@pytest.mark.parametrize(("tag", "expected"), [("Loss/train", True), ("lm loss", True), ("Loss/test", False)])
def test_tags_are_read_as_the_columns_of_other_logs(tmp_path, tag, expected):
    assert losses(read(tmp_path, record(event(3, tag, 0.5)))[0]) == ([(3, 0.5)] if expected else [])


def test_the_trainers_mean_over_the_run_is_no_loss_of_its_last_step(tmp_path):
    summary = [record(event(9, f"train/{tag}", 7.0)) for tag in ("train_runtime", "train_loss")]
    log, _ = read(tmp_path, b"".join([record(event(9, "train/loss", 0.5)), *summary]))
    assert losses(log) == [(9, 0.5)]
    assert losses(read(tmp_path, b"".join(summary))[0]) == []


TENSORS = {
    "float_val": (field(1, 1) + field(5, struct.pack("<f", 0.5)), 0.5),
    "double_val": (field(1, 2) + field(6, struct.pack("<d", 0.1)), 0.1),
    "content": (field(4, struct.pack("<f", 0.5)) + field(1, 1), 0.5),
    "two": (field(1, 1) + field(5, struct.pack("<2f", 0.5, 0.5)), None),
    "text": (field(1, 7) + field(8, b"loss"), None),
}


@pytest.mark.parametrize("name", TENSORS)
def test_scalars_that_are_tensors(tmp_path, name):
    tensor, expected = TENSORS[name]
    data = field(2, 5) + field(5, field(1, field(1, b"loss") + field(8, tensor)))
    assert losses(read(tmp_path, record(data))[0]) == ([] if expected is None else [(5, expected)])


HOSTILE = {
    "negative step": field(2, -3) + field(5, scalar("loss", 1.0)),
    "endless varint": b"\x10" + b"\xff" * 200,
    "giant length": b"\x2a" + varint(1 << 60) + b"x",
    "group": b"\x0b" * 500,
    "bytes": bytes(range(256)),
    "huge step": field(2, 1 << 62) + field(5, scalar("loss", 1.0)),
    "a tag that is the step": field(2, 3) + field(5, scalar("step", 9.0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_gives_nothing_and_the_rest_is_read(tmp_path, name):
    log, skipped = read(tmp_path, record(event(1)) + record(HOSTILE[name]) + record(event(2)))
    assert (losses(log), skipped) == ([(1, 1.0), (2, 1.0)], [])


def test_a_record_of_any_length_is_passed_over_or_the_end(tmp_path):
    image = record(b"\x2a" + varint(9000) + b"x" * 9000)
    assert losses(read(tmp_path, record(event(1)) + image + record(event(2)))[0]) == [(1, 1.0), (2, 1.0)]
    for length in (1 << 62, (1 << 64) - 1):
        head = struct.pack("<Q", length)
        beyond = head + masked_crc(head).to_bytes(4, "little")
        assert losses(read(tmp_path, record(event(1)) + beyond + record(event(2)))[0]) == [(1, 1.0)]


def test_a_scan_judges_by_the_event_files_beside_the_weights(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / f"{NAME}.pt.1").write_bytes(b"".join(record(event(step, value=math.nan)) for step in range(9)))
    report = scan(tmp_path)
    assert [(f.code, f.where.global_step) for f in report.findings] == [("AMP722", 0)]
    assert report.skipped == ()


def test_links_and_folders_in_place_of_event_files(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / "real").write_bytes(record(event(1)))
    (tmp_path / f"{NAME}2").symlink_to(tmp_path / "real")
    assert losses(steps_in(tmp_path)[0]) == [(1, 1.0)]
    (tmp_path / f"{NAME}1").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="link to nothing"):
        steps_in(tmp_path)
