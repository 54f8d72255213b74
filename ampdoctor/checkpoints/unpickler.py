"""Reads a pickle without importing or calling anything: the objects that it would build become descriptions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ampdoctor.errors import CheckpointError, LimitExceededError

_MAX_INT_KEY = 2**60
"""Larger ints as keys are kept apart: `hash` is modulo 2^61 - 1, so a file could make all of them collide."""
_FEW = 64
"""A smaller dict may have any collisions."""
_AHEAD = 1000
"""How far a key may lie beyond those of a larger dict that came before it: they may come in another order."""


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function named by a pickle ("module.qualified_name"); it is not imported."""

    name: str


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object that a pickle would build; it is never built."""

    name: str  # "module.qualified_name" of the callable
    args: tuple[Any, ...] = ()
    state: Any = None  # argument of its `__setstate__`, or its `__dict__`
    items: list[Any] = field(default_factory=list)  # values to append to it
    pairs: list[tuple[Any, Any]] = field(default_factory=list)  # entries to set in it

    def __repr__(self) -> str:
        return f"<{self.name[:80]}>"  # not its contents: a value shared at every level would be written 2^n times


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueKey:
    """A dict key that is no plain value. It is hashed by identity, because hashing a nest of tuples takes 2^n steps."""

    value: Any

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


@dataclass(frozen=True, slots=True)
class DictItems:
    """The pairs of a call that makes a dict, and their number as far as known; the machine checks the keys itself."""

    pairs: Iterable[tuple[Any, Any]]
    count: int


def put(target: dict[Any, Any], key: Any, value: Any) -> None:
    """Set `target[key] = value`; a key that may be chosen to collide (numbers hash to themselves) as `OpaqueKey`."""
    is_safe = isinstance(key, str | bytes | bool | PickledObject | GlobalName | OpaqueKey) or key is None
    if len(target) < _FEW:
        is_safe = is_safe or isinstance(key, float) or (isinstance(key, int) and abs(key) < _MAX_INT_KEY)
    else:
        is_safe = is_safe or (type(key) is int and 0 <= key < 2 * (len(target) + _AHEAD))
    target[key if is_safe else OpaqueKey(key)] = value


def run_together(numbers: Iterable[int]) -> bool:
    """Whether plain ints may be keys of a dict: they are few, or a dense range. See `put`."""
    known = list(numbers)
    return len(known) <= 16_384 or (min(known) >= 0 and max(known) - min(known) < 1.5 * len(known))


MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""Maximum size of one pickle; a state dict of 100,000 tensors needs about 20 MB."""
MAX_OBJECT_BYTES = 160 * 1024 * 1024
"""Maximum memory for a pickle and its objects, by the costs below; a tensor takes about 800 bytes."""
_MAX_INT_BYTES = 128
"""Longer ints stay bytes: no checkpoint computes with one, and printing takes time quadratic in the length."""

CONTAINER_COST = 64
_NUMBER_COST = 40

U1, U2, I4, U4, U8, F8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))


# -- the machine --
#
# torch's restricted unpickler calls what is on its list, refuses whole files for one `argparse.Namespace` beside the
# weights, and a file of some kilobytes can make it fill memory. Here every opcode (`pickletools`) has a known cost.

MAX_OPCODES = 5_000_000
"""A tensor takes about 28: enough for an optimizer's state of 60,000 parameters, in about two seconds."""

_ITEM_COST = 16
_RECORD_COST = 160


class _Stop(Exception):  # noqa: N818 - not an error: the pickle's last opcode
    pass


class _Mark:
    """The mark on the stack before a list of arguments."""


_MARK = _Mark()
_NOTHING = object()
"""An empty place of the memo."""


class SafeUnpickler:
    """Runs the pickles in `data`; a call that `builder` does not understand becomes a `PickledObject`.

    `builder` is a `TensorBuilder` (it keeps the machine free of torch); `unsafe_globals` are the names that it does not
    know (`known`), in order, once each.
    """

    def __init__(
        self,
        data: bytes,
        name: str,
        builder: Any,
        *,
        max_opcodes: int = MAX_OPCODES,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        self._max_object_bytes = max_object_bytes
        self._max_opcodes = max_opcodes
        self._data = data
        self._name = name
        self._builder = builder
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._memoised = 0
        self._at = 0
        self._spent = len(data)
        self._left = max_opcodes
        self.unsafe_globals: dict[str, None] = {}

    def run(self, start: int = 0) -> tuple[Any, int]:
        """Returns the object, and the position after the pickle that begins at `start`.

        Raises CheckpointError for a malformed pickle or an opcode that no checkpoint uses, LimitExceededError for one
        larger than a checkpoint's.
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

    # reading bytes: numbers and text, each charged with the memory that it takes

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
        """Returns an integer of any length; an overlong one as `PickledObject`."""
        self._spend(_NUMBER_COST + len(raw))
        if len(raw) > _MAX_INT_BYTES:
            return PickledObject("builtins.int", (raw,))
        return int.from_bytes(raw, "little", signed=True)

    def _sized_long(self, form: struct.Struct) -> None:
        self._stack.append(self._integer(self._take(self._number(form))))

    def _plain_number(self, form: struct.Struct) -> None:
        self._spend(_NUMBER_COST)
        self._stack.append(self._number(form))

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

    def _append(self) -> None:
        value, target = self._pop(), self._top()
        if type(target) is list:
            self._spend(_ITEM_COST)
            target.append(value)
        else:
            self._extend([value])

    def _extend(self, values: list[Any]) -> None:
        self._spend(_ITEM_COST * len(values))
        target = self._top()
        if isinstance(target, PickledObject):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise TypeError(target)

    def _set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError(len(values))
        self._spend(4 * _ITEM_COST * len(values))
        target = self._top()
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, PickledObject):
            target.pairs.extend(pairs)
        elif isinstance(target, dict):
            self._fill(target, pairs)
        else:
            raise TypeError(target)

    def _fill(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        for key, value in pairs:
            put(target, key, value)
        return target

    def _put(self, index: int) -> None:
        # a list, because a file could choose the slots of a dict
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
        name = f"{module}.{name}"
        if not self._builder.known(name):
            self.unsafe_globals.setdefault(name)
        self._stack.append(GlobalName(name))

    def _reduce(self) -> None:
        args, func = self._pop(), self._pop()
        self._call(func, args)

    def _newobj_ex(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        if not isinstance(args, tuple) or not isinstance(keywords, dict):
            raise TypeError(args)
        self._spend(_ITEM_COST * len(args))
        self._call(cls, (*args, keywords) if keywords else args)

    def _call(self, func: Any, args: Any) -> None:
        """Push the result of REDUCE and similar opcodes; only the builder is ever called."""
        if not isinstance(args, tuple):
            raise TypeError(args)
        name = func.name if isinstance(func, GlobalName | PickledObject) else type(func).__name__
        self._spend(_RECORD_COST + _ITEM_COST * len(args))
        made = self._builder.build(name, args) if isinstance(func, GlobalName) else NotImplemented
        if made is NotImplemented:
            made = PickledObject(name, args)
        elif isinstance(made, DictItems):
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
        if isinstance(target, PickledObject):
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
            f"(0x{self._data[self._at - 1]:02x} at byte {self._at - 1}). "
            "Pickles of protocol 0 and 1 are not read: save such a file again with protocol 2."
        )

    def _unknown(self) -> None:
        raise self._malformed(f"byte {self._at - 1} is no opcode")


_Step = Callable[[SafeUnpickler], None]


def _constant_step(value: Any) -> _Step:
    return lambda m: m._stack.append(value)


# fmt: off
_STEPS: dict[str, _Step] = {
    # numbers and constants
    "\x8a": lambda m: m._sized_long(U1), "\x8b": lambda m: m._sized_long(I4),
    "J": lambda m: m._plain_number(I4), "K": lambda m: m._stack.append(m._number(U1)),
    "M": lambda m: m._plain_number(U2), "G": lambda m: m._plain_number(F8),
    "N": _constant_step(None), "\x88": _constant_step(True), "\x89": _constant_step(False),
    # text and bytes
    "T": lambda m: m._old_string(I4), "U": lambda m: m._old_string(U1),
    "X": lambda m: m._sized_text(U4), "\x8c": lambda m: m._sized_text(U1), "\x8d": lambda m: m._sized_text(U8),
    "B": lambda m: m._sized_bytes(U4), "C": lambda m: m._sized_bytes(U1), "\x8e": lambda m: m._sized_bytes(U8),
    "\x96": lambda m: m._sized_bytes(U8),
    # containers; a set becomes a list, because the file would choose what is hashed
    "]": lambda m: m._push_container([]), "}": lambda m: m._push_container({}), "\x8f": lambda m: m._push_container([]),
    ")": _constant_step(()), "t": lambda m: m._make_tuple(m._marked()),
    "\x85": lambda m: m._tuple_of(1), "\x86": lambda m: m._tuple_of(2), "\x87": lambda m: m._tuple_of(3),
    "\x91": SafeUnpickler._list,
    "a": SafeUnpickler._append, "e": lambda m: m._extend(m._marked()), "\x90": lambda m: m._extend(m._marked()),
    "s": lambda m: m._set_items([m._pop(), m._pop()][::-1]), "u": lambda m: m._set_items(m._marked()),
    # stack and memo
    "(": _constant_step(_MARK), "0": lambda m: m._stack.pop(),
    "1": lambda m: (m._marked(), None)[1], "2": lambda m: m._stack.append(m._top()),
    "q": lambda m: m._put(m._number(U1)),
    "r": lambda m: m._put(m._number(U4)),
    "\x94": lambda m: m._put(m._memoised),
    "h": lambda m: m._get(m._number(U1)), "j": lambda m: m._get(m._number(U4)),
    # opcodes that would import or call something
    "c": SafeUnpickler._global, "\x93": SafeUnpickler._stack_global, "R": SafeUnpickler._reduce,
    "\x81": SafeUnpickler._reduce, "\x92": SafeUnpickler._newobj_ex,
    "b": SafeUnpickler._build, "Q": lambda m: m._persistent(m._pop()),
    # the frame around it
    "\x80": SafeUnpickler._protocol, "\x95": SafeUnpickler._frame, ".": SafeUnpickler._stop,
    # EXT1, EXT2, EXT4 name things by number in a registry of the process; NEXT_BUFFER and READONLY_BUFFER need data
    # that are not in the file
    "\x82": SafeUnpickler._refused, "\x83": SafeUnpickler._refused, "\x84": SafeUnpickler._refused,
    "\x97": SafeUnpickler._refused, "\x98": SafeUnpickler._refused,
    **dict.fromkeys("FILPSVdgilop", SafeUnpickler._refused),  # of protocols 0 and 1, which torch.save never writes
}
# fmt: on
_TABLE: tuple[_Step, ...] = tuple(_STEPS.get(chr(code), SafeUnpickler._unknown) for code in range(256))
