"""Pickles that would run code, wherever a pickle can be."""

from __future__ import annotations

import pickle
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.unpickler import GlobalName, PickledObject, SafeUnpickler
from ampdoctor.errors import AmpdoctorError, CheckpointError
from tests.security import hostile as h

CANARY = "ampdoctor_canary"
"""A module that would tell of its import, and whose functions would tell of a call."""

SYSTEM = h.named(CANARY, "fire")
ARGUMENT = h.text("now")


class Reduced:
    def __reduce__(self):
        return __import__(CANARY).fire, ("now",)


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The canary's witness: a file that exists as soon as its module is imported or one of its functions called."""
    witness = tmp_path / "witness"
    package = tmp_path / "path"
    package.mkdir()
    (package / f"{CANARY}.py").write_text(
        f"open({str(witness)!r}, 'a').write('imported')\n"
        f"def fire(*a, **k): open({str(witness)!r}, 'a').write('fired')\n"
        "class Fire:\n"
        "    def __new__(cls, *a, **k): fire(); return object.__new__(cls)\n"
        "    def __setstate__(self, state): fire()\n"
    )
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, CANARY, raising=False)
    return witness


FIRE = h.named(CANARY, "Fire")

# S1; pytorch#189308: an object's pickle chooses what is called, and torch's own reader of distributed checkpoints calls
OPCODES = {
    "REDUCE": h.call(SYSTEM, ARGUMENT),
    "NEWOBJ": FIRE + h.MARK + ARGUMENT + h.TUPLE + b"\x81",
    "NEWOBJ_EX": FIRE + h.MARK + ARGUMENT + h.TUPLE + h.table({"k": h.NONE}) + b"\x92",
    "BUILD": FIRE + h.EMPTY_TUPLE + b"\x81" + h.table({"k": h.NONE}) + h.BUILD,
    "STACK_GLOBAL": h.call(b"\x8c\x10" + CANARY.encode() + b"\x8c\x04fire\x93", ARGUMENT),
    "nested": h.call(h.call(h.named("functools", "partial"), SYSTEM, ARGUMENT)),
    "getattr": h.call(h.named("builtins", "getattr"), h.named(CANARY, "Fire"), h.text("__new__")),
    "as a class of torch": h.call(
        h.named("torch._tensor", "_rebuild_from_type_v2"), SYSTEM, FIRE, h.MARK + ARGUMENT + h.TUPLE, h.table({})
    ),
    "as a default factory": h.call(h.named("collections", "defaultdict"), SYSTEM),
    "as a key": h.EMPTY_DICT + h.call(SYSTEM, ARGUMENT) + h.NONE + h.SETITEM,
    "persistent module": h.MARK + h.text("module") + FIRE + h.text("file") + h.text("source") + h.TUPLE + b"Q",
}


@pytest.mark.parametrize("place", ["beside a model", "root", "legacy"])
@pytest.mark.parametrize("opcode", OPCODES)
def test_what_would_be_called_is_named_and_neither_imported_nor_called(opcode, place, tmp_path, canary):
    attack = OPCODES[opcode]
    content = {
        "beside a model": h.model_and(attack),
        "root": h.torch_zip(h.whole(attack)),
        "legacy": h.legacy(h.table({"x": attack, "model": h.table({})})),
    }[place]
    (tmp_path / "c.pt").write_bytes(content)
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert any(name.startswith(CANARY) for name in checkpoint.unsafe_globals)
        assert [float(ref.stored.load().sum()) for ref in checkpoint] == ([2.0] if place == "beside a model" else [])
    assert CANARY not in sys.modules
    assert not canary.exists()


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_no_protocol_of_pickle_runs_anything(protocol, form, tmp_path, canary):
    """S1, with files that pickle itself has written."""
    module = type(sys)(CANARY)
    module.fire = type("fire", (), {"__module__": CANARY, "__qualname__": "fire"})
    sys.modules[CANARY] = module
    try:
        pickled = pickle.dumps({"x": Reduced(), "model": {}}, protocol=protocol)
    finally:
        del sys.modules[CANARY]
    content = h.torch_zip(pickled) if form == "zip" else h.LEGACY_HEAD + pickled + h.whole(h.EMPTY_LIST)
    (tmp_path / "c.pt").write_bytes(content)
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert checkpoint.unsafe_globals == (f"{CANARY}.fire",)
    assert CANARY not in sys.modules
    assert not canary.exists()


NUMBERED = [b"\x82\x01", b"\x83\x01\0", b"\x84\x01\0\0\0", b"\x97", b"h\0\x98"]
OLD = [b"I1\n", b"S'a'\n", h.MARK + ARGUMENT + b"i" + f"{CANARY}\nfire\n".encode(), h.MARK + FIRE + ARGUMENT + b"o"]


@pytest.mark.parametrize("code", [*NUMBERED, *OLD])
def test_what_no_checkpoint_needs_is_refused(code, tmp_path):
    """S1: EXT1, EXT2, EXT4, NEXT_BUFFER, READONLY_BUFFER; and what only protocols 0 and 1 write."""
    (tmp_path / "c.pt").write_bytes(h.model_and(code))
    with pytest.raises(CheckpointError, match=r"uses an opcode that no checkpoint needs|corrupted"):
        open_checkpoint(tmp_path / "c.pt")


def test_a_saved_file_in_a_byte_string_stays_a_byte_string(tmp_path, canary):
    """S1: what torch's reader of distributed checkpoints would load in turn."""
    inner = h.model_and(h.call(SYSTEM, ARGUMENT))
    for key, data in {"B": inner, "X": h.whole(h.call(SYSTEM, ARGUMENT))}.items():
        content = h.model_and(b"B" + struct.pack("<I", len(data)) + data)
        (tmp_path / f"{key}.pt").write_bytes(content)
        with open_checkpoint(tmp_path / f"{key}.pt") as checkpoint:
            assert checkpoint.unsafe_globals == ()
    assert not canary.exists()


class _Nothing:
    def known(self, _name):
        return False

    def build(self, _name, _args):
        return NotImplemented

    def persistent(self, pid):
        return pid


NAMES = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30)
LIKELY = st.sampled_from(["os", "posix", "builtins", "torch", "torch._utils", "numpy", "subprocess", "__main__", "sys"])


@given(LIKELY | NAMES, st.sampled_from(["system", "eval", "__import__", "getattr", "load"]) | NAMES)
def test_any_name_gives_an_inert_record(module, name):
    """S2: lists of bad names fail (picklescan#66, modelscan#263, arXiv 2508.19774), so that no name may be imported."""
    before = set(sys.modules)
    for function in (h.named(module, name), h.text(module) + h.text(name) + b"\x93"):
        machine = SafeUnpickler(h.whole(h.call(function, h.NONE)), "x", _Nothing())
        value, _ = machine.run()
        assert type(value) is PickledObject
        assert (value.name, value.args) == (f"{module}.{name}", (None,))
        assert list(machine.unsafe_globals) == [f"{module}.{name}"]
        bare, _ = SafeUnpickler(h.whole(function), "x", _Nothing()).run()
        assert bare == GlobalName(f"{module}.{name}")
    assert set(sys.modules) == before


FORBIDDEN = (
    "weights_only=False", "add_safe_globals", "safe_globals(", "pickle.load", "pickle.Unpickler", "import _pickle",
    "torch.load(", "torch.jit", "allow_pickle", "eval(", "exec(", "mmap=True,", "import pickle", "marshal",
    "shelve", "yaml",
)  # fmt: skip


LOOSE = ("weights_only=False", "add_safe_globals", "pickle.load", "allow_pickle")


@pytest.mark.parametrize("room", ["", "checkpoints", "evidence", "diagnosis", "numerics", "reports"])
def test_nothing_that_scan_is_made_of_can_load_a_pickle(room):
    """S3, S4: CVE-2025-32434 and CVE-2026-24747 are in torch's unpickler, which is not called; and a retry with
    `weights_only=False` hands the choice to the file (Stanza's advisory), in no room of the package."""
    for file in (Path(__file__).parents[2] / "ampdoctor" / room).rglob("*.py"):
        lines = [line for line in file.read_text().splitlines() if not room or "`" not in line]
        code = "\n".join(line for line in lines if "weights_only=True" not in line)
        assert [word for word in (FORBIDDEN if room else LOOSE) if word in code] == [], file.name


@given(st.binary(max_size=60))
def test_any_bytes_as_a_pickle_end_in_a_value_or_in_our_own_error(data):
    try:
        SafeUnpickler(h.PROTO + data, "x", _Nothing()).run()
    except AmpdoctorError as error:
        assert "\n" not in str(error)  # noqa: PT017 - refusing is one of two right answers
