"""A frame that the test writes itself, and a file that W&B has written where it is installed."""

from __future__ import annotations

import json
import math
import struct
import zlib

import pytest

from ampdoctor.evidence.log_records import EndLine, StepLine
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from tests.health.reading.test_event_files import field

BLOCK = 32768


def framed(records):
    """The file of these records: cut at the ends of blocks, as LevelDB cuts them."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        rest, first = record, True
        while first or rest:
            room = BLOCK - len(out) % BLOCK
            if room < 7:
                out += bytes(room)
                continue
            piece, rest = rest[: room - 7], rest[room - 7 :]
            kind = (2 if rest else 1) if first else (3 if rest else 4)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + piece), len(piece), kind) + piece
            first = False
    return bytes(out)


def history(step, **values):
    items = {"_step": step, **values}
    inside = b"".join(
        field(1, field(2, key.encode()) + field(16, json.dumps(value).encode())) for key, value in items.items()
    )
    return field(2, inside)


def read(path):
    noticed = ReadIssues()
    found = find_log(path)
    assert found.kind.format == "wandb"
    return list(found.lines(noticed)), noticed


def test_records_are_put_together_across_blocks(tmp_path):
    rows = [history(at, loss=2.0 - at / 100, pad="x" * 9000) for at in range(12)]
    (tmp_path / "run-abc.wandb").write_bytes(framed([*rows, field(18, b"\x08\x03")]))
    lines, noticed = read(tmp_path)
    assert [one.line.step for one in lines if isinstance(one.line, StepLine)] == list(range(12))
    assert (lines[0].line.name, lines[-1].line) == ("abc", EndLine(exit_code=3))
    assert not noticed.skipped


def test_a_damaged_block_costs_no_more_than_its_rest(tmp_path):
    whole = bytearray(framed([history(at, loss=1.0, pad="x" * 3000) for at in range(40)]))
    whole[BLOCK + 5000] ^= 1
    (tmp_path / "run-abc.wandb").write_bytes(whole)
    lines, noticed = read(tmp_path)
    found = [one.line.step for one in lines if isinstance(one.line, StepLine)]
    assert 0 < 40 - len(found) < 12
    assert found[-1] == 39
    assert "damaged" in noticed.skipped[0].reason


@pytest.mark.parametrize(
    "odd", [{"_step": 10**400}, {"_step": 2**53}, {"_timestamp": math.inf}, {"_timestamp": math.nan}]
)
def test_a_step_or_a_time_that_is_none_costs_no_other(tmp_path, odd):
    rows = [history(1, loss=1.0), history(2, loss=1.0, **odd), history(3, loss=1.0)]
    if "_step" in odd:
        rows[1] = history(odd["_step"], loss=1.0)
    (tmp_path / "run-abc.wandb").write_bytes(framed(rows))
    found = [one.line.step for one in read(tmp_path)[0] if isinstance(one.line, StepLine)]
    assert found == ([1, 3] if "_step" in odd else [1, 2, 3])


def test_what_wandb_itself_writes(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="small", dir=str(tmp_path))
    for step in (10, 20):
        loss = math.nan if step == 20 else 1.5
        run.log({"train/loss": loss, "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "train/global_step": step})
    run.finish()
    lines, _ = read(tmp_path / "wandb")
    first, second = (one.line for one in lines if isinstance(one.line, StepLine))
    assert (first.step, first.loss, first.gradient_norm, first.learning_rates) == (10, 1.5, 0.5, (1e-3,))
    assert (second.step, math.isnan(second.loss)) == (20, True)
    assert lines[-1].line == EndLine(exit_code=0)
