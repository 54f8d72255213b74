"""The floors of the house: arrows go only down, the core neither prints nor knows Typer and Rich, files stay short."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ampdoctor"

DIRECT = {
    "evidence": set(),
    "loop": {"evidence"},
    "numerics": {"evidence"},
    "ranges": {"numerics"},
    "checkpoints": {"numerics"},
    "precision": {"numerics"},
    "replay": {"loop", "precision", "checkpoints"},
    "probes": {"ranges", "replay"},  # replay: the Protocol that they plug into
    "bisect": set(),
    "scaling": {"ranges"},
    "diagnosis": {"evidence"},
    "gates": {"diagnosis"},
    "workflows": {"replay", "probes", "bisect", "scaling", "diagnosis"},
    "reports": {"diagnosis"},
    "training": {"replay", "probes", "scaling", "diagnosis"},
    "integrations": {"training", "workflows", "reports"},
    "cli": {"workflows", "reports", "gates"},
}
"""Each room, and the rooms that its arrows point at; what those point at may be used as well."""

STOREYS = {"checkpoints": ("storage", "pickles", "formats", "contents", "layouts", "measures")}
"""Rooms with storeys of their own, from the ground up: a file may import from its own storey and from those below. The
files that lie directly in the room stand above all."""

EVERYWHERE = {"errors"}
WITHOUT_TORCH = {"errors", "evidence", "bisect", "diagnosis", "gates", "reports"}
PRINTERS = {"cli"}
REDIRECTORS = {"ampdoctor.replay.user_code"}  # flushes it before what user code prints is sent to stderr
RICH = {"cli", "reports"}
MAX_LINES = 400


def allowed(room):
    """Return every room that `room` may import from."""
    reached, waiting = {room}, [room]
    while waiting:
        for below in DIRECT[waiting.pop()] - reached:
            reached.add(below)
            waiting.append(below)
    return reached | EVERYWHERE


def imported_modules(tree, module):
    """Yield (line, absolute name) of each import in the tree, those for type checking included: they are arrows too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, base] if base else parts)
            # `from ampdoctor import numerics` names a room where `from ampdoctor.numerics import x` names its content
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(package):
    """Return a sentence for each rule of the house that a file below `package` breaks."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = relative.parts[0].removesuffix(".py")
        module = ".".join([package.name, *relative.with_suffix("").parts])
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found += [f"{relative}: {sentence}" for sentence in _broken(package.name, room, module, tree)]
        lines = len(text.splitlines())
        if lines > MAX_LINES:
            found.append(f"{relative}: {lines} lines; at most {MAX_LINES} can be read in one sitting")
    return found


def _broken(package, room, module, tree):
    outside_floors = room in {"__init__", "__main__"}  # the package's own front door, which points at everything
    if not outside_floors and room not in DIRECT.keys() | EVERYWHERE:
        yield f"{room} is no room of the house"
        return
    permitted = EVERYWHERE if room in EVERYWHERE else set() if outside_floors else allowed(room)
    for line, name in imported_modules(tree, module):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == package and not outside_floors and target in DIRECT and target not in permitted:
            yield f"line {line}: {room} must not know {target}"
        above = _above(room, module, rest)
        if above is not None:
            yield f"line {line}: {module.rpartition('.')[0]} must not know {above}"
        if top == "torch" and room in WITHOUT_TORCH:
            yield f"line {line}: {room} must not import torch"
        if (top == "typer" and room != "cli") or (top == "rich" and room not in RICH) or top == "click":
            yield f"line {line}: {room} must not import {top}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno}: print; results are returned, and only the command line writes"
        writes = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (
            writes
            and (node.value.id, node.attr) == ("sys", "stdout")
            and room not in PRINTERS
            and module not in REDIRECTORS
        ):
            yield f"line {node.lineno}: sys.stdout belongs to the report"


def _above(room, module, name):
    """The storey above its own, or the file above all storeys, that a file imports; None where it looks down."""
    storeys = STOREYS.get(room, ())
    own, (there, storey) = module.removeprefix(f"ampdoctor.{room}.").partition(".")[0], (*name.split("."), "")[:2]
    if own not in storeys or there != room or not storey:
        return None
    rank = storeys.index(storey) if storey in storeys else len(storeys)
    return storey if rank > storeys.index(own) else None


def test_the_house_stands():
    assert violations(PACKAGE) == []


def test_every_room_has_its_floor():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= DIRECT.keys()


def test_the_floors_have_no_cycle():
    assert all(room not in allowed(below) for room in DIRECT for below in DIRECT[room])


@pytest.mark.parametrize(
    ("file", "code", "sentence"),
    [
        ("numerics/a.py", "from ampdoctor.replay import engine", "numerics must not know replay"),
        ("numerics/a.py", "from ampdoctor import replay", "numerics must not know replay"),
        ("numerics/a.py", "import ampdoctor.replay.engine", "numerics must not know replay"),
        ("numerics/a.py", "from ..replay import engine", "numerics must not know replay"),
        ("numerics/a.py", "def f():\n    from ampdoctor.cli import main", "numerics must not know cli"),
        ("numerics/a.py", "if TYPE_CHECKING:\n    from ampdoctor.probes import x", "numerics must not know probes"),
        ("reports/a.py", "from ampdoctor.numerics import FORMATS", "reports must not know numerics"),
        ("bisect/a.py", "from ampdoctor.evidence import where", "bisect must not know evidence"),
        ("errors.py", "from ampdoctor.evidence import where", "errors must not know evidence"),
        ("diagnosis/a.py", "import torch.nn", "diagnosis must not import torch"),
        ("workflows/a.py", "from rich.console import Console", "workflows must not import rich"),
        ("reports/a.py", "import typer", "reports must not import typer"),
        ("cli/a.py", "import click", "cli must not import click"),
        ("replay/a.py", "print(1)", "print"),
        ("replay/a.py", "import sys\nsys.stdout.write('x')", "sys.stdout"),
        ("attic/a.py", "", "attic is no room"),
        (
            "checkpoints/formats/a.py",
            "from ampdoctor.checkpoints.contents import x",
            "formats must not know contents",
        ),
        ("checkpoints/storage/a.py", "from ampdoctor.checkpoints.opening import x", "storage must not know opening"),
        ("replay/a.py", "\n" * 401, "401 lines"),
    ],
)
def test_the_check_can_fail(file, code, sentence, tmp_path):
    package = tmp_path / "ampdoctor"
    target = package / file
    target.parent.mkdir(parents=True)
    target.write_text(code)
    assert any(sentence in violation for violation in violations(package))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (
            "workflows/a.py",
            "from ampdoctor.replay import engine\nfrom ampdoctor.errors import UsageError\nimport torch",
        ),
        (
            "replay/a.py",
            "from ampdoctor.numerics import FORMATS\nfrom . import engine\nfrom ..numerics import Histogram",
        ),
        ("cli/a.py", "import typer, rich, sys\nfrom ampdoctor.diagnosis.catalogue import CATALOGUE\nsys.stdout"),
        ("__init__.py", "from ampdoctor.workflows.scan import scan"),
        ("checkpoints/layouts/a.py", "from ampdoctor.checkpoints.formats import x"),
        ("checkpoints/opening.py", "from ampdoctor.checkpoints.measures import x"),
    ],
)
def test_what_is_allowed_passes(file, code, tmp_path):
    package = tmp_path / "ampdoctor"
    target = package / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(code)
    assert violations(package) == []


HEAVY = "import sys; import {module}; sys.exit(any(m.split('.')[0] in {heavy} for m in sys.modules))"


@pytest.mark.parametrize(
    "module",
    [
        "ampdoctor",
        "ampdoctor.evidence.report",
        "ampdoctor.reports.human",
        "ampdoctor.cli.main",
        "ampdoctor.diagnosis",
        "ampdoctor.gates.ignores",
    ],
)
def test_importing_it_does_not_import_torch(module, run_cli):
    script = HEAVY.format(module=module, heavy={"torch", "numpy"})
    assert run_cli(command=(sys.executable, "-c", script)).returncode == 0


def test_the_check_of_imports_can_fail(run_cli):
    script = HEAVY.format(module="torch", heavy={"torch"})
    assert run_cli(command=(sys.executable, "-c", script)).returncode == 1


def test_the_core_does_not_import_the_command_line(run_cli):
    script = HEAVY.format(module="ampdoctor.workflows.request", heavy={"typer", "rich"})
    assert run_cli(command=(sys.executable, "-c", script)).returncode == 0
