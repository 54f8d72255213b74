"""Files of a hostile author: pickles put together by hand, zips around them, safetensors with any header."""

from __future__ import annotations

import io
import json
import struct
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

PROTO, STOP, MARK = b"\x80\x02", b".", b"("
EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE = b"]", b"}", b")"
APPEND, APPENDS, SETITEM, SETITEMS, TUPLE, REDUCE, BUILD, NONE = b"a", b"e", b"s", b"u", b"t", b"R", b"b", b"N"

LEGACY_HEAD = (
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # the magic number
    b"\x80\x02M\xe9\x03."  # 1001
    b"\x80\x02}X\x0d\0\0\0little_endian\x88s."
)


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw)) + raw


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + MARK + b"".join(arguments) + TUPLE + REDUCE


def values(*parts: bytes) -> bytes:
    return EMPTY_LIST + MARK + b"".join(parts) + APPENDS


def table(pairs: dict[str, bytes]) -> bytes:
    return EMPTY_DICT + MARK + b"".join(text(key) + value for key, value in pairs.items()) + SETITEMS


def storage(key: str, numel: int, kind: str = "FloatStorage") -> bytes:
    return MARK + text("storage") + named("torch", kind) + text(key) + text("cpu") + number(numel) + TUPLE + b"Q"


def sizes(*numbers: int) -> bytes:
    return MARK + b"".join(map(number, numbers)) + TUPLE


def tensor(store: bytes, shape: bytes, stride: bytes, start: int = 0) -> bytes:
    rest = b"\x89" + call(named("collections", "OrderedDict"))
    return call(named("torch._utils", "_rebuild_tensor_v2"), store, number(start), shape, stride, rest)


ONES = tensor(storage("0", 2), sizes(2), sizes(1))
"""A healthy tensor, so that a file has something to report where nothing is wrong with it."""
ONES_BYTES = struct.pack("<2f", 1, 1)


def whole(pickle: bytes) -> bytes:
    return PROTO + pickle + STOP


def torch_zip(pickle: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A file of `torch.save` with this `data.pkl`, and storage 0 with two ones."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("c/data.pkl", pickle)
        archive.writestr("c/byteorder", b"little")
        for key, data in {"data/0": ONES_BYTES, "version": b"3\n", **(records or {})}.items():
            archive.writestr(f"c/{key}", data)
    return target.getvalue()


def model_and(extra: bytes) -> bytes:
    """A healthy model, and beside it what a hostile author has to add."""
    return torch_zip(whole(table({"model": table({"w": ONES}), "extra": extra})))


def legacy(pickle: bytes, keys: bytes = EMPTY_LIST, data: bytes = b"") -> bytes:
    return LEGACY_HEAD + whole(pickle) + whole(keys) + data


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def saved(content: Any, **keywords: Any) -> bytes:
    target = io.BytesIO()
    torch.save(content, target, **keywords)
    return target.getvalue()


FIRST_SHARD = "__0_0.distcp"


def distributed() -> dict[str, bytes]:
    """The files of a small distributed checkpoint, by torch."""
    from torch.distributed import checkpoint

    weight = torch.arange(6.0).reshape(2, 3)
    state = {"model": {"w": weight, "n": torch.tensor(1.5)}, "scaler": {"scale": 2.0}, "step": 3}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        checkpoint.save(state, checkpoint_id=folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
