"""Files as torch and safetensors write them, read here as they read them: names, dtypes, shapes, strides, bytes."""

from __future__ import annotations

import builtins
import collections
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import _weights_only_unpickler

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.safetensors_file import read_safetensors
from ampdoctor.checkpoints.stored_tensor import StoredTensor, StridedTensor
from ampdoctor.checkpoints.torch_files import read_torch_legacy, read_torch_zip
from ampdoctor.checkpoints.torch_objects import TensorBuilder

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
LEGACY_DTYPES = tuple(d for d in DTYPES if d not in UNSIGNED and not str(d).startswith("torch.float8"))
"""What torch can write in its old format."""
ONLY_HERE = (torch.complex128, torch.float8_e8m0fnu)
"""What safetensors cannot write, and what it writes and cannot load."""

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
VIEWS = ("plain", "transposed", "expanded", "every second", "from the second on", "a parameter", "reversed dims", "all")


@st.composite
def tensors(draw, dtypes=DTYPES):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(SHAPES)
    raw = draw(st.binary(min_size=0, max_size=64)) or b"\0"
    size = math.prod(shape) * dtype.itemsize
    data = bytearray((raw * (size // len(raw) + 1))[:size])
    if dtype is torch.bool:
        data = bytearray(b & 1 for b in data)
    whole = torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    view = draw(st.sampled_from(VIEWS))
    match view:
        case "transposed" if whole.dim() >= 2:
            return whole.transpose(0, -1)
        case "expanded":
            return whole.unsqueeze(0).expand(3, *whole.shape)
        case "every second" if whole.dim() and whole.shape[-1] > 1:
            return whole[..., ::2]
        case "from the second on" if whole.dim() and whole.shape[0] > 1:
            return whole[1:]
        case "a parameter" if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.nn.Parameter(whole)
        case "reversed dims" if whole.dim():
            return whole.permute(*reversed(range(whole.dim())))
    return whole


PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
)
KEYS = st.text(max_size=12) | st.integers(-5, 300)


def trees(dtypes):
    leaf = tensors(dtypes) | PLAIN | st.sampled_from(dtypes) | st.just(torch.Size([1, 2]))
    return st.recursive(
        leaf,
        lambda below: (
            st.lists(below, max_size=4)
            | st.lists(below, max_size=3).map(tuple)
            | st.dictionaries(KEYS, below, max_size=4)
            | st.dictionaries(KEYS, below, max_size=4).map(collections.OrderedDict)
            | below.map(lambda value: [value, value])
        ),
        max_leaves=8,
    )


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, StoredTensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, tuple(theirs.shape))
        loaded = ours.load()
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert isinstance(ours, StridedTensor)
        assert ours.start == theirs.storage_offset()
        assert ours.storage_bytes == theirs.untyped_storage().nbytes()
        plain = theirs.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        assert torch.equal(loaded.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8), plain)
        counted = sum(chunk.numel() for chunk in ours.chunks(5))
        repeated = math.prod(n for n, step in zip(theirs.shape, theirs.stride(), strict=True) if step == 0)
        assert counted * max(repeated, 1) >= theirs.numel()
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple)
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            same(our, their)
    elif isinstance(theirs, torch.dtype):
        assert ours.name == str(theirs)
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs or (ours != ours and theirs != theirs)  # noqa: PLR0124 - NaN


def identities(node):
    """Which tensors of a tree are one, as positions of the first of each."""
    found = []

    def visit(part):
        if isinstance(part, StoredTensor | torch.Tensor):
            found.append(part)
        elif isinstance(part, dict):
            for value in part.values():
                visit(value)
        elif isinstance(part, list | tuple):
            for value in part:
                visit(value)

    visit(node)
    keys = [t.identity if isinstance(t, StoredTensor) else (t.data_ptr(), t.shape, t.stride()) for t in found]
    return [
        keys.index(key)
        for key, t in zip(keys, found, strict=True)
        if (t.numel if isinstance(t, StoredTensor) else t.numel())
    ]


def check_saved(path, tree, read, **keywords):
    written = io.BytesIO()
    torch.save(tree, written, **keywords)
    path.write_bytes(written.getvalue())
    theirs = torch.load(path, weights_only=False)  # our own file; the restricted reader knows protocol 2 only
    with RegularFile(path, "c.pt") as file:
        saved = read(file)
        same(saved.tree, theirs)
        assert identities(saved.tree) == identities(theirs)
        assert set(saved.unsafe_globals) <= {
            "builtins.bytes",
            "__builtin__.bytes",
        }  # how protocol 2 writes an empty string


@settings(max_examples=60)
@given(trees(DTYPES), st.integers(2, 5))
def test_a_zip_of_torch_is_read_as_torch_reads_it(tmp_path_factory, tree, protocol):
    check_saved(tmp_path_factory.mktemp("zip") / "c.pt", tree, read_torch_zip, pickle_protocol=protocol)


@settings(max_examples=60)
@given(trees(LEGACY_DTYPES), st.integers(2, 5))
def test_a_legacy_file_is_read_as_torch_reads_it(tmp_path_factory, tree, protocol):
    check_saved(
        tmp_path_factory.mktemp("old") / "c.pt",
        tree,
        read_torch_legacy,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=False,
    )


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
        tensors(tuple(d for d in DTYPES if d not in ONLY_HERE)),
        max_size=5,
    )
)
def test_safetensors_is_read_as_the_library_reads_it(tmp_path_factory, state):
    state = {k: v.detach().contiguous().clone() for k, v in state.items() if k != "__metadata__"}
    path = tmp_path_factory.mktemp("safe") / "m.safetensors"
    path.write_bytes(save_safetensors(state))
    theirs = load_safetensors(path.read_bytes())
    with RegularFile(path, "m.safetensors") as file:
        content = read_safetensors(file)
        assert content.tensors.keys() == theirs.keys()
        assert content.skipped == ()
        for name, stored in content.tensors.items():
            loaded = stored.load()
            assert (loaded.dtype, loaded.shape, loaded.stride()) == (
                theirs[name].dtype, theirs[name].shape, theirs[name].stride(),
            )  # fmt: skip
            assert torch.equal(loaded.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8))


def test_the_names_that_are_known_are_those_that_torch_allows():
    """The report says of every other name that `torch.load(weights_only=True)` refuses it."""
    builder = TensorBuilder(None, None)  # type: ignore[arg-type]  # names are known without a file
    allowed = set(_weights_only_unpickler._get_allowed_globals())
    assert {name for name in allowed if not builder.known(name)} == set()
    module = type(torch)
    told = {f"torch.{name}" for name, value in vars(torch).items() if not isinstance(value, module)}
    told |= {f"torch._utils.{name}" for name in vars(torch._utils)}
    told |= {f"torch._tensor.{name}" for name in vars(torch._tensor)}
    told |= {f"torch.storage.{name}" for name in vars(torch.storage)}
    told |= {f"torch.cuda.{name}" for name in vars(torch.cuda)} | {f"builtins.{name}" for name in dir(builtins)}
    assert {name for name in told if builder.known(name)} <= allowed
