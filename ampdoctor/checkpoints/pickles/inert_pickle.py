"""A pickle machine that imports nothing and calls nothing: whatever a pickle asks for becomes an inert record.

Why it exists: the standard library's machine imports and calls by design. torch's restricted one calls what is on its
list, refuses whole files for one `argparse.Namespace` beside the weights (DeepSpeed, Lightning), and a file of some
kilobytes can make it hash and fill memory. Here every opcode has a known cost, and a file is refused if the sum exceeds
what a checkpoint needs. Opcodes and their meaning: `pickletools` in the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from ampdoctor.checkpoints.pickles.inert import Builder, Entries, Global, Inert, KeyWatch
from ampdoctor.checkpoints.pickles.pickle_bytes import (
    CONTAINER_COST,
    F8,
    I4,
    MAX_OBJECT_BYTES,
    U1,
    U2,
    U4,
    U8,
    PickleBytes,
)
from ampdoctor.errors import CheckpointError, LimitExceededError

MAX_OPCODES = 5_000_000
"""A tensor takes about 28: enough for an optimizer's state over 60,000 parameters, in about two seconds."""

_ITEM_COST = 16
_RECORD_COST = 160


class _Stop(Exception):  # noqa: N818 - not an error: the pickle's last opcode
    pass


class _Mark:
    """Marks where a list of arguments begins on the stack."""


_MARK = _Mark()
_NOTHING = object()
"""Marks an empty place of the memo."""


class InertMachine(PickleBytes):
    """Runs one pickle.

    Args:
        data: Bytes that hold the pickle, perhaps among others.
        name: The file's name in errors.
        builder: Returns values for the calls that it understands; any other call becomes an `Inert`.
        max_opcodes: Maximum number of opcodes that are run.
        max_object_bytes: Maximum memory for the pickle and its objects.

    Attributes:
        foreign: Names of the classes and functions in the pickle that the builder does not know, in order, once each.
    """

    def __init__(
        self,
        data: bytes,
        name: str,
        builder: Builder,
        *,
        max_opcodes: int = MAX_OPCODES,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        super().__init__(data, name, max_object_bytes)
        self._max_opcodes = max_opcodes
        self._builder = builder
        self._memo: list[Any] = []
        self._memoised = 0
        self._left = max_opcodes
        self._keys = KeyWatch()
        self.foreign: dict[str, None] = {}

    def run(self, start: int = 0) -> tuple[Any, int]:
        """Returns the object, and the position after the pickle that begins at `start`.

        Raises:
            CheckpointError: It is not a pickle, malformed, or uses an opcode that a checkpoint never does.
            LimitExceededError: It is larger than a checkpoint's pickle.
        """
        self._stack, self._memo, self._memoised, self._at = [], [], 0, start
        data, table = self._data, _TABLE
        try:
            for self._left in range(self._left - 1, -1, -1):  # noqa: B020 - what one pickle uses, the next has not
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
        raise LimitExceededError(f"{self._name}: opcodes of a pickle", self._max_opcodes, self._max_opcodes + 1)

    def _marked(self) -> list[Any]:
        """Take the values above the last mark off the stack, together with the mark."""
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

    # one method per opcode, in the order of pickletools

    def _push_container(self, value: Any) -> None:
        self._spend(CONTAINER_COST)
        self._stack.append(value)

    def _make_tuple(self, values: list[Any]) -> None:
        self._spend(CONTAINER_COST + _ITEM_COST * len(values))
        self._stack.append(tuple(values))

    def _tuple_of(self, count: int) -> None:
        self._make_tuple([self._pop() for _ in range(count)][::-1])

    def _list(self) -> None:
        values = self._marked()
        self._spend(CONTAINER_COST + _ITEM_COST * len(values))
        self._stack.append(values)

    def _dict(self) -> None:
        values = self._marked()
        self._push_container({})
        self._set_items(values)

    def _append(self) -> None:
        value, target = self._pop(), self._top()
        if type(target) is list:
            self._spend(_ITEM_COST)
            target.append(value)
        else:
            self._extend([value])

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
            self._fill(target, pairs)
        else:
            raise TypeError(target)

    def _fill(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        put = self._keys.put
        for key, value in pairs:
            put(target, key, value)
        return target

    def _mark(self) -> None:
        self._stack.append(_MARK)

    def _pop_one(self) -> None:
        self._stack.pop()

    def _dup(self) -> None:
        self._stack.append(self._top())

    def _put(self, index: int) -> None:
        # a list, because a dict's slots follow from its keys, and the file would choose those
        memo = self._memo
        if not 0 <= index < self._max_opcodes:
            raise IndexError(index)
        if index >= len(memo):
            self._spend(_ITEM_COST * (index + 1 - len(memo)))
            memo.extend([_NOTHING] * (index + 1 - len(memo)))
        self._memoised += memo[index] is _NOTHING
        memo[index] = self._top()

    def _get(self, index: int) -> None:
        value = self._memo[index] if index >= 0 else _NOTHING
        if value is _NOTHING:
            raise KeyError(index)
        self._stack.append(value)

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
        if not isinstance(args, tuple) or not isinstance(keywords, dict):
            raise TypeError(args)
        self._spend(_ITEM_COST * len(args))
        self._call(cls, (*args, keywords) if keywords else args)

    def _inst(self) -> None:
        args = tuple(self._marked())
        self._global()
        self._call(self._pop(), args)

    def _obj(self) -> None:
        cls, *args = self._marked()
        self._call(cls, tuple(args))

    def _call(self, func: Any, args: Any) -> None:
        """Push the result of REDUCE and its kin; only the builder is ever called."""
        if not isinstance(args, tuple):
            raise TypeError(args)
        name = func.name if isinstance(func, Global | Inert) else type(func).__name__
        self._spend(_RECORD_COST + _ITEM_COST * len(args))
        made = self._builder.build(name, args) if isinstance(func, Global) else NotImplemented
        if made is NotImplemented:
            made = Inert(name, args)
        elif isinstance(made, Entries):
            self._spend(8 * _ITEM_COST * made.count)
            made = self._fill({}, made.pairs)
        elif isinstance(made, list):
            self._spend(_ITEM_COST * len(made))
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
        if self._number(U1) > 5:
            raise ValueError

    def _frame(self) -> None:
        if self._number(U8) > len(self._data) - self._at:
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


_Step = Callable[[InertMachine], None]


def _constant_step(value: Any) -> _Step:
    return lambda m: m._stack.append(value)


# fmt: off
_STEPS: dict[str, _Step] = {
    # numbers and constants
    "I": PickleBytes._int, "L": PickleBytes._long,
    "\x8a": lambda m: m._sized_long(U1), "\x8b": lambda m: m._sized_long(I4),
    "J": lambda m: m._plain_number(I4), "K": lambda m: m._stack.append(m._number(U1)),
    "M": lambda m: m._plain_number(U2), "G": lambda m: m._plain_number(F8), "F": PickleBytes._float,
    "N": _constant_step(None), "\x88": _constant_step(True), "\x89": _constant_step(False),
    # text and bytes
    "S": PickleBytes._string, "V": PickleBytes._unicode,
    "T": lambda m: m._old_string(I4), "U": lambda m: m._old_string(U1),
    "X": lambda m: m._sized_text(U4), "\x8c": lambda m: m._sized_text(U1), "\x8d": lambda m: m._sized_text(U8),
    "B": lambda m: m._sized_bytes(U4), "C": lambda m: m._sized_bytes(U1), "\x8e": lambda m: m._sized_bytes(U8),
    "\x96": lambda m: m._sized_bytes(U8),
    # containers; a set's members are only listed, because hashing them is the file's choice
    "]": lambda m: m._push_container([]), "}": lambda m: m._push_container({}), "\x8f": lambda m: m._push_container([]),
    ")": _constant_step(()), "t": lambda m: m._make_tuple(m._marked()),
    "\x85": lambda m: m._tuple_of(1), "\x86": lambda m: m._tuple_of(2), "\x87": lambda m: m._tuple_of(3),
    "l": InertMachine._list, "d": InertMachine._dict, "\x91": InertMachine._list,
    "a": InertMachine._append, "e": InertMachine._appends, "\x90": InertMachine._appends,
    "s": InertMachine._setitem, "u": InertMachine._setitems,
    # stack and memo
    "(": InertMachine._mark, "0": InertMachine._pop_one, "1": lambda m: (m._marked(), None)[1], "2": InertMachine._dup,
    "p": lambda m: m._put(int(m._decimal())), "q": lambda m: m._put(m._number(U1)),
    "r": lambda m: m._put(m._number(U4)),
    "\x94": lambda m: m._put(m._memoised), "g": lambda m: m._get(int(m._decimal())),
    "h": lambda m: m._get(m._number(U1)), "j": lambda m: m._get(m._number(U4)),
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
