"""Files of some kilobytes that ask for more work or memory than a machine has: S8 and S11, and their kin."""

from __future__ import annotations

import os
import struct

import pytest
import torch

from tests.security import hostile as h

PRIME = 2**61 - 1
"""Python hashes ints and floats modulo this: all multiples of it fall into one slot."""
SECONDS = 20.0  # of the processor: what grows faster than its input takes hours
BYTES = 200_000_000


def probes(count, bits):
    """Ints that lie behind one another where a dict of 2^bits slots looks for a free one."""
    slots, at = [], 0
    for _ in range(count):
        slots.append(at)
        at = (5 * at + 1) % 2**bits
    return slots


def int4(value):
    return b"J" + struct.pack("<i", value)


def many_members(count):
    """A zip of that many empty members; its directory is in order, and its end is of 64 bits."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, 3, *[0] * 6) + b"abc"
    size, start = len(entry) * count, 104
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, count, count, size, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    return (
        b"PK\3\4"
        + bytes(100)
        + entry * count
        + end
        + locator
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, start, 0)
    )


INERT = h.named("a", "b") + h.put(1) + b"0"


def limited():
    return {
        # S8: a zip bomb in data.pkl (33 kB that unpack to 33 MB were measured); the second is plain, and only too long
        "long pickle": h.torch_zip(h.whole(b"B" + struct.pack("<I", 2**26) + bytes(2**26))),
        # S8: many members, and a directory that claims more than the file could need
        "members": many_members(1_000_000),
        "directory": b"PK\3\4" + bytes(40_000_000) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 40_000_000, 4, 0),
        # S11: cpython#115952, LONG_BINPUT asks for gigabytes of memo in nine bytes; opcode loops; long strings; nesting
        "opcodes": h.model_and(h.NONE * 6_000_000),
        "gets": h.model_and(h.EMPTY_LIST + b"q\0" + b"h\0" * 6_000_000),
        "legacy opcodes": h.legacy(h.NONE * 6_000_000),
        "wide text": h.model_and(h.text("\U0001f600" + "a" * 50_000_000)),
        "bytes again and again": h.model_and(
            h.text("a" * 20_000_000) + h.put(1) + b"0" + h.named("_codecs", "encode") + h.put(2) + b"0" + h.EMPTY_LIST
            + (h.get(2) + h.MARK + h.get(1) + h.text("latin1") + b"tRa") * 1000
        ),
        "pairs again and again": h.model_and(
            h.values(*(h.MARK + int4(i) + h.NONE + h.TUPLE for i in range(50_000))) + h.put(1) + b"0"
            + h.named("collections", "OrderedDict") + h.put(2) + b"0" + h.EMPTY_LIST
            + (h.get(2) + h.get(1) + b"\x85Ra") * 10_000
        ),
        "nested lists": h.model_and(b"]" * 1_000_000 + b"a" * 999_999),
        "nested tuples": h.model_and(b")" + b"\x85" * 2_000_000),
        "shared lists": h.model_and(b"]" + b"2\x86" * 60),
        "places of one tensor": h.model_and(
            h.ONES + h.put(1) + b"0" + h.values(*[h.get(1)] * 1000) + h.put(2) + b"0" + h.values(*[h.get(2)] * 1000)
        ),
        "paths": h.model_and(
            h.text("k" * 1_000_000) + h.put(1) + b"0" + h.ONES + h.put(2) + b"0"
            + (h.EMPTY_DICT + h.get(1) + h.get(2) + h.SETITEM + h.put(2) + b"0") * 150 + h.get(2)
        ),
        "an object at many places": h.model_and(
            INERT + h.values(*[h.NONE] * 300_000) + h.put(3) + b"0" + h.get(1) + h.get(3) + b"\x85R" + h.put(2) + b"0"
            + h.values(*[h.get(2)] * 200_000)
        ),
        "dimensions": h.model_and(h.tensor(h.storage("0", 2), h.sizes(*[1] * 100_000), h.sizes(*[1] * 100_000))),
        "safetensors dimensions": h.safetensors(
            {"a": {"dtype": "F32", "shape": [2**62] * 99_999, "data_offsets": [0, 0]}}
        ),
        # S12: a header of brackets becomes gigabytes of lists
        "brackets": h.safetensors(b'{"a":[' + b"[]," * 15_000_000 + b"[]]}"),
        "wide header": h.safetensors(('{"a\U0001f600' + "a" * 50_000_000 + '":1}').encode()),
        "header": h.safetensors(b"{}", length=100_000_001),
        # S7: thousands of views of one storage, each of nearly all of it
        "views": h.torch_zip(
            h.whole(
                h.values(*(h.tensor(h.storage("1", 10**6), h.sizes(10**6 - i), h.sizes(1), i) for i in range(1000)))
            ),
            {"data/1": bytes(4 * 10**6)},
        ),
    }  # fmt: skip


def harmless():
    return {
        # S11: keys that are chosen to collide, of a dict and of the memo; numbers that take the square of their length
        "colliding ints": h.model_and(
            h.EMPTY_DICT + h.MARK + b"".join(h.number(k * PRIME) + h.NONE for k in range(1, 100_000)) + h.SETITEMS
        ),
        "colliding floats": h.model_and(
            h.EMPTY_DICT + h.MARK
            + b"".join(b"G" + struct.pack(">d", k * 2.0**61) + h.NONE for k in range(1, 100_000)) + h.SETITEMS
        ),
        "a long way to a free slot": h.model_and(
            h.EMPTY_DICT + h.MARK + b"".join(int4(k) + h.NONE for k in probes(80_000, 17))
            + b"".join(int4(k << 17) + h.NONE for k in range(1, 1000)) * 100 + h.SETITEMS
        ),
        "memo": h.model_and(h.EMPTY_LIST + b"".join(h.put(k) for k in probes(150_000, 18))),
        "a long number": h.torch_zip(h.whole(h.table({"model": h.table({"w": h.ONES}), "step": h.number(10**30_000)}))),
        "a nest of tuples as a key": h.model_and(h.EMPTY_DICT + h.EMPTY_TUPLE + b"2\x86" * 30 + h.NONE + h.SETITEM),
        # S11: what holds no tensor stands at many places, and a walk finds nothing at each of them
        "numbers at many places": h.model_and(
            h.values(*[h.number(1)] * 20_000) + h.put(1) + b"0" + h.values(*[h.get(1)] * 200)
        ),
        "numbers beside tensors": h.model_and(
            h.values(*[h.number(1)] * 20_000) + h.put(1) + b"0"
            + h.values(*[h.values(h.ONES, h.get(1), h.get(1)) for _ in range(100)])
        ),
        "empty lists at many places": h.model_and(
            h.EMPTY_LIST + h.put(1) + b"0" + h.values(*[h.get(1)] * 20_000) + h.put(2) + b"0"
            + h.values(*[h.get(2)] * 200)
        ),
        "numbers in an optimizer's state": h.torch_zip(
            h.whole(
                h.values(*[h.number(1)] * 20_000) + h.put(1) + b"0"
                + h.table({
                    "param_groups": h.values(h.table({"params": h.values(*(h.text(str(n)) for n in range(200)))})),
                    "state": h.table({str(n): h.table({"exp_avg": h.ONES, "rows": h.get(1)}) for n in range(200)}),
                })
            )
        ),
        # S11: names of optimizer entries are shown, so that their repr() would be taken
        "an optimizer's key": h.torch_zip(
            h.whole(
                h.table(
                    {
                        "param_groups": h.values(h.table({"params": h.values(h.number(0))})),
                        "state": h.EMPTY_DICT + b")" + b"2\x86" * 30 + h.table({"exp_avg": h.ONES}) + h.SETITEM,
                    }
                )
            )
        ),
        # S7: 1.5 kB for a tensor of 10^12 elements, plain and with holes
        "expanded": h.model_and(h.tensor(h.storage("0", 2), h.sizes(10**6, 10**6, 2), h.sizes(0, 0, 1))),
        "expanded with holes": h.torch_zip(
            h.whole(h.table({"w": h.tensor(h.storage("1", 3), h.sizes(10**6, 10**6, 2), h.sizes(0, 0, 2))})),
            {"data/1": struct.pack("<3f", 1, 2, 3)},
        ),
    }  # fmt: skip


def corrupted():
    return {
        "a memo at the end of memory": h.model_and(h.EMPTY_LIST + h.put(2**32 - 1)),
        "a long line": h.model_and(b"I" + b"1" * 5_000_000 + b"\n"),
        "a long float": h.model_and(b"F" + b"1" * 5_000_000 + b"\n"),
        "a long size": h.model_and(h.tensor(h.storage("0", 2), h.sizes(10**5000), h.sizes(1))),
        "a long storage": h.model_and(h.tensor(h.storage("0", 10**5000), h.sizes(2), h.sizes(1))),
        "text as arguments": h.model_and(h.named("a", "b") + h.text("a" * 30_000_000) + h.EMPTY_DICT + b"\x92"),
        "types of types": h.model_and(
            h.named("torch._tensor", "_rebuild_from_type_v2") + h.put(1) + b"0" + h.named("x", "K") + h.put(3) + b"0)"
            + (h.put(2) + b"0" + h.MARK + h.get(1) + h.get(3) + h.get(2) + b"Nt") * 5000
            + h.put(2) + b"0" + h.get(1) + h.get(2) + h.REDUCE
        ),
        "a list that holds itself": h.model_and(h.EMPTY_LIST + b"2a"),
        "legacy, keys": h.legacy(h.NONE, h.values(h.number(10**5000))),
        "legacy, nest of keys": h.legacy(h.NONE, h.EMPTY_LIST + b")" + b"2\x86" * 60 + b"a"),
        "legacy, length": h.legacy(
            h.tensor(h.storage("0", 2**60), h.sizes(1), h.sizes(1)), h.values(h.text("0")), b"\xff" * 8
        ),
    }  # fmt: skip


def cheap(taken):
    assert taken["seconds"] < SECONDS, taken
    assert taken["growth"] < BYTES, taken


@pytest.mark.slow
def test_what_asks_for_too_much_is_refused_with_the_limit_and_what_was_asked_for(watched):
    for name, taken in watched(limited()).items():
        assert taken["error"] == "LimitExceededError", (name, taken)
        assert taken["actual"] > taken["limit"] > 0, (name, taken)
        assert "\n" not in taken["message"], name
        cheap(taken)


@pytest.mark.slow
def test_what_is_built_to_take_forever_takes_as_long_as_any_file(watched):
    for name, taken in watched(harmless()).items():
        assert taken.get("verdict") == "healthy", (name, taken)
        cheap(taken)


def test_what_contradicts_itself_is_corrupted_whatever_its_size(watched):
    for name, taken in watched(corrupted()).items():
        assert taken["error"] == "CheckpointError", (name, taken)
        assert "\n" not in taken["message"], name
        assert len(taken["message"]) < 500, name
        cheap(taken)


def logs():
    return {
        "newlines": ("metrics.csv", b"step,loss\n" + b"\n" * 10_000_000),
        "other newlines": ("x.jsonl", b"\r\n" * 5_000_000),
        "objects": ("x.jsonl", b"{}\n" * 3_000_000),
        "commas": ("metrics.csv", b"step,loss\n" + b",\n" * 5_000_000),
        "one line": ("log.txt", "\U0001f600".encode() + b"a" * 20_000_000),
        "wide lines": ("metrics.csv", b"step,loss\n" + (b"," * 500_000 + b"\n") * 20),
        "an honest log": ("x.jsonl", b"".join(b'{"step":%d,"loss":1}\n' % i for i in range(50_000))),
        "the trainer's": ("trainer_state.json", b'{"log_history":[' + b'{"step":1,"loss":1},' * 40_000 + b"5]}"),
    }


@pytest.mark.slow
def test_a_log_takes_seconds_whatever_is_in_it(watched, tmp_path):
    cases = logs()
    for case, (name, content) in cases.items():
        (tmp_path / case).mkdir()
        (tmp_path / case / "m.pt").write_bytes(h.saved({"w": torch.ones(2)}))
        (tmp_path / case / name).write_bytes(content)
    for case, taken in watched(dict.fromkeys(cases)).items():
        assert taken.get("verdict") == "healthy", (case, taken)
        cheap(taken)


def test_many_small_tensors_are_not_held_at_once(watched):
    """S13: a histogram takes kilobytes, so that 100,000 of them would take gigabytes."""
    count = 4000
    entry = {"dtype": "F32", "shape": [1]}
    header = {f"t{i}": {**entry, "data_offsets": [4 * i, 4 * i + 4]} for i in range(count)}
    (taken,) = watched({"m.safetensors": h.safetensors(header, bytes(range(1, 5)) * count)}).values()
    assert taken["verdict"] == "healthy"
    assert taken["growth"] < 60_000_000


def sparse(path, size):
    """A safetensors file with one tensor of zeros that take no room on the disk."""
    elements = size // 4
    head = h.safetensors({"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}})
    path.write_bytes(head)
    os.truncate(path, len(head) + 4 * elements)


def test_memory_does_not_grow_with_the_file(watched, tmp_path):
    """S23: torch.load holds the file; a mapped file counts against a container's limit (516 MB of 512, measured)."""
    sparse(tmp_path / "big.safetensors", 600_000_000)
    (taken,) = watched({"big.safetensors": None}).values()
    assert "verdict" in taken, taken
    assert taken["growth"] < 150_000_000
