"""A pickle machine that imports nothing and calls nothing: what a pickle asks for becomes an inert record.

Why there is one: the standard library's machine imports and calls by design; torch's restricted one calls what is on
its list, refuses whole files for one `argparse.Namespace` beside the weights (DeepSpeed, Lightning), and can be made to
hash and fill memory by a file of some kilobytes. Here every opcode has a known cost, and a file is refused when the sum
is beyond what a checkpoint needs. Opcodes and their meaning: `pickletools` in the standard library.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any, Protocol

from ampdoctor.checkpoints.inert import Global, Inert, dict_key
from ampdoctor.errors import CheckpointError, LimitExceededError

MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""Of one pickle; a state dict of 100,000 tensors needs about 20 MB."""
MAX_OPCODES = 5_000_000
"""A tensor takes about 28: this is an optimizer's state over 60,000 parameters, and about two seconds."""
MAX_OBJECT_BYTES = 160 * 1024 * 1024
"""What the objects of one pickle may take in memory, by the costs below; a tensor takes about 800 bytes."""

_CONTAINER_COST = 64
_ITEM_COST = 16
_RECORD_COST = 160


class Builder(Protocol):
    """What is made of the calls that are understood; the seam keeps the machine free of torch."""

    def known(self, name: str) -> bool:
        """Whether a class or function of this name is what torch itself loads without running foreign code."""

    def build(self, name: str, args: tuple[Any, ...]) -> Any:
        """The value of a call, or `NotImplemented` where it is not understood; it never imports or calls `name`."""

    def persistent(self, pid: Any) -> Any:
        """The value behind a persistent id."""


class _Stop(Exception):  # noqa: N818 - not an error: the pickle's last opcode
    pass


class _Mark:
    """Where a list of arguments begins on the stack."""


_MARK = _Mark()


class InertMachine:
    """Runs one pickle.

    Args:
        data: Bytes that hold the pickle, perhaps among others.
        name: How errors name the file.
        builder: Gives a value to calls that are understood; any other becomes an `Inert`.

    Attributes:
        foreign: Names of the classes and functions that the pickle refers to and the builder does not know, in order,
            once each.
    """

    def __init__(self, data: bytes, name: str, builder: Builder) -> None:
        self._data = data
        self._name = name
        self._builder = builder
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._at = 0
        self._spent = 0
        self.foreign: dict[str, None] = {}

    def run(self, start: int = 0) -> tuple[Any, int]:
        """The object, and the position behind the pickle that begins at `start`.

        Raises:
            CheckpointError: It is no pickle, malformed, or uses an opcode that a checkpoint never does.
            LimitExceededError: It is larger than a checkpoint's.
        """
        self._stack, self._memo, self._at = [], {}, start
        data, table = self._data, _TABLE
        try:
            for _ in range(MAX_OPCODES):
                code = data[self._at]
                self._at += 1
                table[code](self)
        except _Stop:
            if not self._stack or self._stack[-1] is _MARK:
                raise self._malformed("it ends without a value") from None
            return self._stack[-1], self._at
        except (IndexError, struct.error):
            raise self._malformed("it is cut off") from None
        except (KeyError, ValueError, TypeError, OverflowError, AttributeError):
            raise self._malformed("its opcodes contradict each other") from None
        raise LimitExceededError(f"{self._name}: opcodes of a pickle", MAX_OPCODES, MAX_OPCODES + 1)

    def _malformed(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._name} is corrupted: its pickled structure cannot be read, {why}.")

    def _spend(self, cost: int) -> None:
        self._spent += cost
        if self._spent > MAX_OBJECT_BYTES:
            raise LimitExceededError(f"{self._name}: bytes of pickled objects", MAX_OBJECT_BYTES, self._spent)

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
        text = raw.decode("utf-8", "surrogatepass")
        # a string takes up to four bytes a character, however few of them need that
        self._spend(_CONTAINER_COST + (len(raw) if text.isascii() else 4 * len(text)))
        return text

    def _marked(self) -> list[Any]:
        """What lies on the stack above the last mark, taken off together with it."""
        stack, at = self._stack, len(self._stack) - 1
        while stack[at] is not _MARK:
            if at == 0:
                raise IndexError(at)
            at -= 1
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError(value)
        return value

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise ValueError(value)
        return value

    # one method an opcode, in the order of pickletools

    def _int(self) -> None:
        line = self._line()
        self._stack.append(line == b"01" if line in {b"00", b"01"} else int(line))  # booleans of protocol 0

    def _long(self) -> None:
        self._stack.append(int(self._line().rstrip(b"L")))

    def _long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(_U1)), "little", signed=True))

    def _long4(self) -> None:
        size = self._number(_I4)
        self._spend(max(size, 0) + _ITEM_COST)
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _string(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in {b"'", b'"'}:
            raise ValueError(line)
        self._stack.append(self._text(codecs.escape_decode(line[1:-1])[0]))

    def _unicode(self) -> None:
        self._stack.append(self._text(self._line().decode("raw-unicode-escape").encode("utf-8", "surrogatepass")))

    def _old_string(self, form: struct.Struct) -> None:
        raw = self._take(self._number(form))
        self._spend(_CONTAINER_COST + len(raw))
        self._stack.append(raw.decode("latin-1"))

    def _sized_text(self, form: struct.Struct) -> None:
        self._stack.append(self._text(self._take(self._number(form))))

    def _sized_bytes(self, form: struct.Struct) -> None:
        raw = self._take(self._number(form))
        self._spend(_CONTAINER_COST + len(raw))
        self._stack.append(raw)

    def _push_container(self, value: Any) -> None:
        self._spend(_CONTAINER_COST)
        self._stack.append(value)

    def _make_tuple(self, values: list[Any]) -> None:
        self._spend(_CONTAINER_COST + _ITEM_COST * len(values))
        self._stack.append(tuple(values))

    def _tuple_of(self, count: int) -> None:
        self._make_tuple([self._pop() for _ in range(count)][::-1])

    def _list(self) -> None:
        values = self._marked()
        self._spend(_CONTAINER_COST + _ITEM_COST * len(values))
        self._stack.append(values)

    def _dict(self) -> None:
        values = self._marked()
        self._push_container({})
        self._set_items(values)

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        self._spend(_ITEM_COST * len(values))
        target = self._top()
        if isinstance(target, Inert):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise TypeError(target)

    def _setitem(self) -> None:
        self._set_items([self._pop(), self._pop()][::-1])

    def _setitems(self) -> None:
        self._set_items(self._marked())

    def _set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError(len(values))
        self._spend(4 * _ITEM_COST * len(values))
        target = self._top()
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, Inert):
            target.pairs.extend(pairs)
        elif isinstance(target, dict):
            for key, value in pairs:
                target[dict_key(key)] = value
        else:
            raise TypeError(target)

    def _mark(self) -> None:
        self._stack.append(_MARK)

    def _pop_one(self) -> None:
        self._stack.pop()

    def _dup(self) -> None:
        self._stack.append(self._top())

    def _put(self, index: int) -> None:
        if index not in self._memo:
            self._spend(6 * _ITEM_COST)
        self._memo[index] = self._top()

    def _global(self) -> None:
        self._named(self._line().decode("utf-8"), self._line().decode("utf-8"))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError(name)
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        self._spend(_RECORD_COST + len(module) + len(name))
        self._stack.append(self._foreign_global(f"{module}.{name}"))

    def _foreign_global(self, name: str) -> Global:
        if not self._builder.known(name):
            self.foreign.setdefault(name)
        return Global(name)

    def _reduce(self) -> None:
        args, func = self._pop(), self._pop()
        self._call(func, args)

    def _newobj_ex(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        self._call(cls, (*args, keywords) if keywords else args)

    def _inst(self) -> None:
        module, name = self._line().decode("utf-8"), self._line().decode("utf-8")
        self._call(self._foreign_global(f"{module}.{name}"), tuple(self._marked()))

    def _obj(self) -> None:
        cls, *args = self._marked()
        self._call(cls, tuple(args))

    def _call(self, func: Any, args: Any) -> None:
        """What REDUCE and its kin leave on the stack; nothing is ever called but the builder."""
        if not isinstance(args, tuple):
            raise TypeError(args)
        name = func.name if isinstance(func, Global | Inert) else type(func).__name__
        self._spend(_RECORD_COST + _ITEM_COST * len(args))
        made = self._builder.build(name, args) if isinstance(func, Global) else NotImplemented
        if made is NotImplemented:
            made = Inert(name, args)
        elif isinstance(made, dict | list):
            self._spend(4 * _ITEM_COST * len(made))
        elif isinstance(made, bytes):
            self._spend(len(made))
        self._stack.append(made)

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, Inert):
            target.state = state

    def _persistent(self, pid: Any) -> None:
        self._spend(_RECORD_COST)
        self._stack.append(self._builder.persistent(pid))

    def _protocol(self) -> None:
        if self._number(_U1) > 5:
            raise ValueError

    def _frame(self) -> None:
        if self._number(_U8) > len(self._data) - self._at:
            raise IndexError

    def _stop(self) -> None:
        raise _Stop

    def _refused(self) -> None:
        raise CheckpointError(
            f"{self._name} is refused: its pickle uses an opcode that no checkpoint needs "
            f"(0x{self._data[self._at - 1]:02x} at byte {self._at - 1})."
        )

    def _unknown(self) -> None:
        raise self._malformed(f"byte {self._at - 1} is no opcode")


_U1, _U2, _I4, _U4, _U8, _F8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))

_Step = Callable[[InertMachine], None]


def _number_step(form: struct.Struct) -> _Step:
    return lambda m: m._stack.append(m._number(form))


def _constant_step(value: Any) -> _Step:
    return lambda m: m._stack.append(value)


# fmt: off
_STEPS: dict[str, _Step] = {
    # numbers and constants
    "I": InertMachine._int, "L": InertMachine._long, "\x8a": InertMachine._long1, "\x8b": InertMachine._long4,
    "J": _number_step(_I4), "K": _number_step(_U1), "M": _number_step(_U2), "G": _number_step(_F8),
    "F": lambda m: m._stack.append(float(m._line())),
    "N": _constant_step(None), "\x88": _constant_step(True), "\x89": _constant_step(False),
    # text and bytes
    "S": InertMachine._string, "V": InertMachine._unicode,
    "T": lambda m: m._old_string(_I4), "U": lambda m: m._old_string(_U1),
    "X": lambda m: m._sized_text(_U4), "\x8c": lambda m: m._sized_text(_U1), "\x8d": lambda m: m._sized_text(_U8),
    "B": lambda m: m._sized_bytes(_U4), "C": lambda m: m._sized_bytes(_U1), "\x8e": lambda m: m._sized_bytes(_U8),
    "\x96": lambda m: m._sized_bytes(_U8),
    # containers; a set's members are only listed, because hashing them is the file's choice
    "]": lambda m: m._push_container([]), "}": lambda m: m._push_container({}), "\x8f": lambda m: m._push_container([]),
    ")": _constant_step(()), "t": lambda m: m._make_tuple(m._marked()),
    "\x85": lambda m: m._tuple_of(1), "\x86": lambda m: m._tuple_of(2), "\x87": lambda m: m._tuple_of(3),
    "l": InertMachine._list, "d": InertMachine._dict, "\x91": InertMachine._list,
    "a": InertMachine._append, "e": InertMachine._appends, "\x90": InertMachine._appends,
    "s": InertMachine._setitem, "u": InertMachine._setitems,
    # stack and memo
    "(": InertMachine._mark, "0": InertMachine._pop_one, "1": lambda m: (m._marked(), None)[1], "2": InertMachine._dup,
    "p": lambda m: m._put(int(m._line())), "q": lambda m: m._put(m._number(_U1)), "r": lambda m: m._put(m._number(_U4)),
    "\x94": lambda m: m._put(len(m._memo)),
    "g": lambda m: m._stack.append(m._memo[int(m._line())]), "h": lambda m: m._stack.append(m._memo[m._number(_U1)]),
    "j": lambda m: m._stack.append(m._memo[m._number(_U4)]),
    # what would import or call
    "c": InertMachine._global, "\x93": InertMachine._stack_global, "R": InertMachine._reduce,
    "\x81": InertMachine._reduce, "\x92": InertMachine._newobj_ex, "i": InertMachine._inst, "o": InertMachine._obj,
    "b": InertMachine._build,
    "P": lambda m: m._persistent(m._line().decode("ascii")), "Q": lambda m: m._persistent(m._pop()),
    # the frame around it
    "\x80": InertMachine._protocol, "\x95": InertMachine._frame, ".": InertMachine._stop,
    # EXT1, EXT2, EXT4 name things by number in a registry of the process; NEXT_BUFFER and READONLY_BUFFER need data
    # that are not in the file
    "\x82": InertMachine._refused, "\x83": InertMachine._refused, "\x84": InertMachine._refused,
    "\x97": InertMachine._refused, "\x98": InertMachine._refused,
}
# fmt: on
_TABLE: tuple[_Step, ...] = tuple(_STEPS.get(chr(code), InertMachine._unknown) for code in range(256))
