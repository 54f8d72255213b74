"""Turns a torch pickle's calls into plain values and stored tensors, without calling anything from torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ampdoctor.checkpoints.files import ByteSource, shown
from ampdoctor.checkpoints.stored_tensor import (
    MAX_DIMENSIONS,
    READ_DTYPES,
    SparseTensor,
    StoredTensor,
    StridedTensor,
    unread,
    unread_dtype,
)
from ampdoctor.checkpoints.unpickler import DictItems, GlobalName, PickledObject
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

_LARGEST = 2**63 - 1
"""Maximum size, stride or length in torch."""

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt8Storage": torch.quint8,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
    "UntypedStorage": torch.uint8,
}
_STORAGE_MODULES = frozenset({"torch", "torch.cuda", "torch.storage"})
_QUANTISED = frozenset({torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4})

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
)
_PLAIN = frozenset(
    {
        "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
        "__builtin__.bytearray", "__builtin__.complex", "__builtin__.set",
        "collections.Counter", "collections.OrderedDict",
        "torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
        "torch.storage.TypedStorage", "torch._tensor._rebuild_from_type_v2",
        "torch.per_channel_affine", "torch.per_channel_affine_float_qparams", "torch.per_channel_symmetric",
        "torch.per_tensor_affine", "torch.per_tensor_symmetric",
        "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor", "torch._utils._rebuild_device_tensor_from_numpy",
        "torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_qtensor", "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_wrapper_subclass",
    }
)  # fmt: skip
"""What `torch.load(weights_only=True)` allows in 2.13, except dtypes and storages (a test compares it)."""

_INTEGERS = Skipped(what="", reason="a quantised tensor, which holds integers")
_NUMPY_SCALARS = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u8": "<Q", "u4": "<I", "b1": "<?"}


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that a pickle refers to: its name in the file, its dtype (uint8 if untyped), and its claimed length."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Its length in bytes, as the pickle claims."""
        return self.numel * self.dtype.itemsize


class TensorBuilder:
    """Understands the calls of `torch.save`; `places` are of the storages' records (None: tensors are not checked)."""

    def __init__(self, file: ByteSource, places: Mapping[str, tuple[int, int]] | None) -> None:
        self._file = file
        self._places = places
        self.storages: dict[str, StorageRef] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
            **dict.fromkeys(_FROM_TYPE, self._from_type),
            "torch._utils._rebuild_qtensor": _quantised,
            "torch._utils._rebuild_sparse_tensor": _sparse,
            "torch._utils._rebuild_sparse_csr_tensor": _sparse,
            "torch._utils._rebuild_meta_tensor_no_storage": _skip("a tensor on the meta device has no data"),
            **{f"torch._utils.{name}": _skip(why) for name, why in _NOT_READ.items()},
            **_VALUES,
        }

    def known(self, name: str) -> bool:
        """Whether torch itself loads this class or function without running foreign code."""
        storage = _storage_dtype(name) is not None and name != "torch.UntypedStorage"  # torch lists its other name
        return name in _PLAIN or name in _DTYPES or storage or _is_tensor_type(name)

    def build(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns a call's value, or `NotImplemented`; raises CheckpointError for wrong arguments of a known call."""
        call = self._calls.get(name)
        if call is None:
            return NotImplemented
        try:
            return call(*args)
        except (TypeError, ValueError, AttributeError, OverflowError, struct.error):
            raise self._wrong(f"the arguments of {name} are wrong") from None

    def persistent(self, pid: Any) -> Any:
        """Returns the storage behind a persistent id, or a class whose source an old torch saved beside it."""
        match pid:
            case ("module", GlobalName() as owner, *_):
                return owner
            case ("storage", GlobalName(name), str(key), _, int(numel), *view):
                dtype = _storage_dtype(name)
                if dtype is None or not 0 <= numel <= _LARGEST or any(v is not None for v in view):
                    raise self._wrong(f"storage {shown(key)} is malformed")
                ref = StorageRef(key, dtype, numel)
                if self.storages.setdefault(key, ref) != ref:
                    raise self._wrong(f"storage {shown(key)} is described in two ways")
                return ref
        raise self._wrong("a reference to a storage is malformed")

    def _wrong(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file.name} is corrupted: {why}.")

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> StoredTensor | Skipped:
        if isinstance(storage, Skipped):
            return storage
        if not isinstance(storage, StorageRef):
            raise TypeError(storage)
        return self._stored(storage, storage.dtype, offset, size, stride)

    def _tensor_v2(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredTensor | Skipped:
        if len(rest) > 2 and rest[2]:
            return unread("a tensor that is conjugated or negated on reading is not read")
        return self._tensor(storage, offset, size, stride)

    def _tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *rest: Any
    ) -> StoredTensor | Skipped:
        if rest and rest[0]:
            return unread("a tensor that is conjugated or negated on reading is not read")
        if not isinstance(storage, StorageRef) or not isinstance(dtype, GlobalName):
            raise TypeError(dtype)
        element = _DTYPES.get(dtype.name)
        if element is None:
            return unread_dtype(dtype.name)
        return self._stored(storage, element, offset, size, stride)

    def _stored(
        self, storage: StorageRef, dtype: torch.dtype, start: Any, shape: Any, stride: Any
    ) -> StoredTensor | Skipped:
        if not _is_ints((start,)) or not _is_ints(shape) or not _is_ints(stride):
            raise TypeError(shape)
        if len(shape) > MAX_DIMENSIONS:
            raise LimitExceededError(f"{self._file.name}: dimensions of a tensor", MAX_DIMENSIONS, len(shape))
        if dtype in _QUANTISED:
            return _INTEGERS
        if dtype not in READ_DTYPES:
            return unread_dtype(str(dtype))
        if self._places is None:
            offset, length = 0, storage.nbytes
        else:
            offset, length = self._places.get(storage.key, (0, -1))
        if length != storage.nbytes:
            raise self._wrong(f"a tensor claims {storage.nbytes} bytes and its record has another length")
        stored = StridedTensor(
            file=self._file,
            offset=offset,
            storage_bytes=length,
            dtype=dtype,
            shape=tuple(shape),
            stride=tuple(stride),
            start=start,
        )
        if not stored.within_storage():
            raise self._wrong(f"a tensor of shape {stored.shape} reaches outside its own storage")
        return stored

    def _from_type(self, func: Any, kind: Any, args: Any, state: Any) -> Any:
        """Returns what a tensor subclass wraps if that is plain, else a record under the subclass's own name."""
        if not isinstance(func, GlobalName) or not isinstance(kind, GlobalName) or not isinstance(args, tuple):
            raise TypeError(func)
        if func.name in _FROM_TYPE:  # the file could nest it as deep as it likes
            raise TypeError(func)
        made = PickledObject(kind.name, args, state) if func.name == _WRAPPER else self.build(func.name, args)
        return PickledObject(kind.name, args, state) if made is NotImplemented else made


_FROM_TYPE = frozenset({"torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"})
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
"""A tensor subclass whose data are in its state: DTensor, ShardedTensor."""

_NOT_READ = {
    "_rebuild_nested_tensor": "a nested tensor is not read",
    "_rebuild_wrapper_subclass": "a tensor subclass without data of its own is not read",
    "_rebuild_device_tensor_from_numpy": "a tensor that a device's plug-in saved as a NumPy array is not read",
    "_rebuild_xla_tensor": "a tensor that a device's plug-in saved as a NumPy array is not read",
}


def _sparse(_layout: Any, data: Any) -> Skipped:
    """Stands for a sparse tensor; `data` are one or two tensors of indices, the values, and the size."""
    values = [part for part in data if isinstance(part, StoredTensor)][-1:]
    if not values:
        return unread("a sparse tensor without values of a form that is read")
    return SparseTensor(what="", reason="a sparse tensor is not read", kind="unread", values=values[0])


def _quantised(_storage: Any, _offset: Any, _size: Any, _stride: Any, quantiser: Any, *_rest: Any) -> Skipped:
    """Stands for integers with one scale, or with one for each channel, which is a tensor and not read."""
    scale = quantiser[1]
    known = isinstance(scale, float) and math.isfinite(scale)
    return _INTEGERS if known else unread("a quantised tensor is not read")


def _first(value: Any, *_rest: Any) -> Any:
    return value


def _skip(reason: str) -> Callable[..., Skipped]:
    return lambda *_args: unread(reason)


def _mapping(*args: Any) -> DictItems:
    """Returns the entries of an OrderedDict, dict or Counter made of nothing, of pairs, or of a mapping."""
    if not args:
        return DictItems((), 0)
    (content,) = args
    if not isinstance(content, dict | list | tuple):
        raise TypeError(content)
    return DictItems(content.items() if isinstance(content, dict) else content, len(content))


def _sequence(content: Any = ()) -> list[Any]:
    if not isinstance(content, list | tuple):
        raise TypeError(content)
    return list(content)


def _size(content: Any = ()) -> tuple[Any, ...]:
    return content if isinstance(content, tuple) else tuple(_sequence(content))


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Returns bytes of protocol 2, which come as text to encode."""
    if encoding not in {"latin1", "latin-1"}:
        raise ValueError(encoding)
    return bytes(text.encode("latin-1"))


def _bytearray(*args: Any) -> Any:
    """Returns a bytearray of bytes only: a number would be a length that the file chooses."""
    match args:
        case (bytes() as content,):
            return content
        case (str() as content, "latin-1" | "latin1"):
            return content.encode("latin-1")
    return b"" if not args else NotImplemented


def _numpy_scalar(dtype: Any, raw: Any = None) -> Any:
    """Returns a NumPy number; loggers leave them beside the weights."""
    if not isinstance(dtype, PickledObject) or dtype.name != "numpy.dtype" or not isinstance(raw, bytes):
        return NotImplemented
    little = not (isinstance(dtype.state, tuple) and len(dtype.state) > 1 and dtype.state[1] == ">")
    form = _NUMPY_SCALARS.get(dtype.args[0]) if dtype.args and isinstance(dtype.args[0], str) else None
    return struct.unpack(form, raw)[0] if form is not None and little else NotImplemented


_BUILTINS: dict[str, Callable[..., Any]] = {
    "bytes": lambda *args: NotImplemented if args else b"",  # the empty bytes of protocol 2
    "dict": _mapping,
    "list": _sequence,
    "tuple": _size,
    "set": _sequence,
    "frozenset": _sequence,
    "bytearray": _bytearray,
}
_VALUES: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda _factory=None, *args: _mapping(*args),
    "torch.Size": _size,
    "torch.device": _first,
    "torch.serialization._get_layout": _first,
    "_codecs.encode": _encode,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    **{f"{module}.{name}": call for module in ("builtins", "__builtin__") for name, call in _BUILTINS.items()},
}


def _storage_dtype(name: str) -> torch.dtype | None:
    module, _, leaf = name.rpartition(".")
    return _STORAGES.get(leaf) if module in _STORAGE_MODULES else None


def _is_tensor_type(name: str) -> bool:
    """Whether it is a legacy tensor class such as `torch.cuda.FloatTensor`."""
    module, _, leaf = name.rpartition(".")
    kind = leaf.removesuffix("Tensor") + "Storage"
    return module in {"torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse"} and (
        leaf.endswith("Tensor") and kind in _STORAGES
    )


def _is_ints(values: Any) -> bool:
    return isinstance(values, tuple | list) and all(type(v) is int and abs(v) <= _LARGEST for v in values)
