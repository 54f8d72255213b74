"""The bytes of a pickle as its machine reads them: numbers and text, each charged with the memory that it takes."""

from __future__ import annotations

import codecs
import re
import struct
from typing import Any

from ampdoctor.checkpoints.pickles.inert import Inert
from ampdoctor.errors import CheckpointError, LimitExceededError

MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""Maximum of one pickle; a state dict of 100,000 tensors needs about 20 MB."""
MAX_OBJECT_BYTES = 160 * 1024 * 1024
"""Maximum memory for a pickle and its objects, by the costs below; a tensor takes about 800 bytes."""
_MAX_INT_BYTES = 128
"""Longer ints stay as bytes: no checkpoint computes with one, and printing one takes the square of its length. The
longest that is known to be saved are the 128 bits of a random generator's state."""

CONTAINER_COST = 64
_NUMBER_COST = 40

U1, U2, I4, U4, U8, F8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))

_ESCAPED = re.compile(rb"(?:[^\\]++|\\[\\'\"nrt]|\\x[0-9a-fA-F]{2})*+")
"""The `repr` of a byte string."""


class PickleBytes:
    """A position in a pickle, the stack that takes its values, and their cost so far.

    Args:
        data: Bytes that hold the pickle, perhaps among others.
        name: The file's name in errors.
        max_object_bytes: Maximum memory for the pickle and its objects.
    """

    def __init__(self, data: bytes, name: str, max_object_bytes: int) -> None:
        self._max_object_bytes = max_object_bytes
        self._data = data
        self._name = name
        self._stack: list[Any] = []
        self._at = 0
        self._spent = len(data)

    def _malformed(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._name} is corrupted: its pickled structure cannot be read, {why}.")

    def _spend(self, cost: int) -> None:
        self._spent += cost
        if self._spent > self._max_object_bytes:
            raise LimitExceededError(f"{self._name}: bytes of pickled objects", self._max_object_bytes, self._spent)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise IndexError(count)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: struct.Struct) -> Any:
        value = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return value

    def _line(self) -> bytes:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    def _text(self, raw: bytes) -> str:
        # a string takes up to four bytes per character, even if few need them
        self._spend(CONTAINER_COST + (1 if raw.isascii() else 4) * len(raw))
        return raw.decode("utf-8", "surrogatepass")

    def _integer(self, raw: bytes) -> Any:
        """Returns a number of as many bytes as the file has for it."""
        self._spend(_NUMBER_COST + len(raw))
        if len(raw) > _MAX_INT_BYTES:
            return Inert("builtins.int", (raw,))
        return int.from_bytes(raw, "little", signed=True)

    def _decimal(self) -> bytes:
        """Returns a line that holds a number."""
        self._spend(_NUMBER_COST)
        line = self._line()
        if len(line) > 2 * _MAX_INT_BYTES:
            raise ValueError
        return line

    def _int(self) -> None:
        line = self._decimal()
        self._stack.append(line == b"01" if line in {b"00", b"01"} else int(line))  # booleans of protocol 0

    def _long(self) -> None:
        self._stack.append(int(self._decimal().removesuffix(b"L")))

    def _sized_long(self, form: struct.Struct) -> None:
        self._stack.append(self._integer(self._take(self._number(form))))

    def _plain_number(self, form: struct.Struct) -> None:
        self._spend(_NUMBER_COST)
        self._stack.append(self._number(form))

    def _float(self) -> None:
        self._stack.append(float(self._decimal()))

    def _string(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in {b"'", b'"'} or not _ESCAPED.fullmatch(line[1:-1]):
            raise ValueError
        self._stack.append(self._text(codecs.escape_decode(line[1:-1])[0]))

    def _unicode(self) -> None:
        line = self._line()
        self._spend(CONTAINER_COST + (1 if line.isascii() and b"\\" not in line else 4) * len(line))
        self._stack.append(codecs.raw_unicode_escape_decode(line)[0])

    def _old_string(self, form: struct.Struct) -> None:
        raw = self._take(self._number(form))
        try:
            self._stack.append(self._text(raw))
        except UnicodeDecodeError:  # bytes of Python 2
            self._stack.append(raw.decode("latin-1"))

    def _sized_text(self, form: struct.Struct) -> None:
        self._stack.append(self._text(self._take(self._number(form))))

    def _sized_bytes(self, form: struct.Struct) -> None:
        raw = self._take(self._number(form))
        self._spend(CONTAINER_COST + len(raw))
        self._stack.append(raw)
