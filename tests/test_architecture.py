"""The floors of the house: arrows go only down and in no circle, the core neither prints nor knows Typer and Rich."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ampdoctor"

DIRECT = {
    "evidence": set(),
    "hooks": {"evidence"},
    "numerics": {"evidence"},
    "ranges": {"numerics"},
    "checkpoints": {"numerics"},
    "precision": {"numerics", "hooks"},
    "replay": {"hooks", "precision", "checkpoints"},
    "probes": {"hooks", "ranges", "precision"},
    "scaling": {"ranges"},
    "batching": {"scaling"},
    "diagnosis": {"evidence"},
    "gates": {"diagnosis"},
    "health": {"checkpoints", "scaling", "diagnosis"},
    "live": {"hooks", "probes", "diagnosis"},
    "workflows": {"replay", "probes", "scaling", "diagnosis", "health", "live", "batching"},
    "reports": {"diagnosis"},
    "training": {"hooks", "precision", "batching"},
    "integrations": {"workflows", "reports"},
    "cli": {"workflows", "reports", "gates"},
}
"""Each room, and the rooms that its arrows point at; what those point at may be used as well."""

HERE = "(files directly in the room)"
STOREYS = {"diagnosis": (HERE, "health", "scan", "replay"), "health": ("reading", "sinks", HERE)}
"""Rooms with storeys of their own, from the ground up: a file may import from its own storey and from those below."""
MOST_LINES = 700
"""In a file: more cannot be read in one sitting."""
MOST_TESTS = 15
"""Files in a folder of tests."""

EVERYWHERE = {"errors", "package"}
WITHOUT_TORCH = {"errors", "package", "evidence", "diagnosis", "gates", "reports"}
PRINTERS = {"cli"}
REDIRECTORS = {"ampdoctor.replay.user_code"}  # flushes it before what user code prints is sent to stderr
RICH = {"cli", "reports"}


def allowed(room):
    """Return every room that `room` may import from."""
    reached, waiting = {room}, [room]
    while waiting:
        for below in DIRECT[waiting.pop()] - reached:
            reached.add(below)
            waiting.append(below)
    return reached | EVERYWHERE


def imported_modules(nodes, module):
    """Yield (line, absolute name) of each import among a tree's nodes, those for type checking too: they are arrows."""
    for node in nodes:
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
    found, imports = [], {}
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = relative.parts[0].removesuffix(".py")
        module = ".".join([package.name, *relative.with_suffix("").parts])
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports[path] = [*imported_modules(nodes, module)]
        found += [f"{relative}: {sentence}" for sentence in _broken(package.name, room, module, nodes, imports[path])]
    lines = {path.relative_to(package): len(path.read_text(encoding="utf-8").splitlines()) for path in imports}
    found += [f"{file}: {count} lines" for file, count in lines.items() if count > MOST_LINES]
    return found + [f"a circle: {' -> '.join(circle)}" for circle in circles(package, imports)]


def test_the_tests_follow_the_house():
    tests = Path(__file__).parent
    shelves = Counter(path.parent.relative_to(tests) for path in tests.rglob("*.py"))
    assert {shelf: count for shelf, count in shelves.items() if count > MOST_TESTS} == {}
    of_rooms = {shelf.parts[:2] for shelf in shelves if len(shelf.parts) > 1 and shelf.parts[0] in STOREYS}
    assert [storey for room, storey in sorted(of_rooms) if storey not in STOREYS[room]] == []


def circles(package, imports):
    """Return the circles of files that import each other, imports for type checking and inside functions included."""
    files = {module_of(package, path): path for path in package.rglob("*.py")}
    arrows = {name: arrows_of(name, imports[path], files) for name, path in files.items()}
    found, done = [], set()

    def walk(name, way):
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for below in sorted(arrows[name]):
                walk(below, [*way, name])
            done.add(name)

    for name in sorted(arrows):
        if name != package.name:  # the front door points at everything
            walk(name, [])
    return found


def module_of(package, path):
    """Return the dotted name of a file; a folder's own is the folder's."""
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows_of(module, imports, files):
    """Return the modules of the package that a file imports."""
    found = set()
    for _, name in imports:
        longest = next((n for n in (name, name.rpartition(".")[0]) if n in files), None)
        if longest is not None and longest not in {module, module.partition(".")[0]}:
            found.add(longest)
    return found


def _broken(package, room, module, nodes, imports):
    outside_floors = room in {"__init__", "__main__"}  # the package's own front door, which points at everything
    if not outside_floors and room not in DIRECT.keys() | EVERYWHERE:
        yield f"{room} is no room of the house"
        return
    permitted = EVERYWHERE if room in EVERYWHERE else set() if outside_floors else allowed(room)
    for line, name in imports:
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
    for node in nodes:
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
    """The storey above its own that a file imports; None where it looks down."""
    storeys = STOREYS.get(room, ())
    there, storey = (*name.split("."), "")[:2]
    if there != room or not storey:
        return None
    own = module.removeprefix(f"ampdoctor.{room}.").partition(".")[0]
    own, storey = (part if part in storeys else HERE for part in (own, storey))
    if own not in storeys or storey not in storeys:
        return None
    return storey if storeys.index(storey) > storeys.index(own) else None


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
        ("numerics/a.py", "from ..replay import engine", "numerics must not know replay"),
        ("numerics/a.py", "if TYPE_CHECKING:\n    from ampdoctor.probes import x", "numerics must not know probes"),
        ("errors.py", "from ampdoctor.evidence import where", "errors must not know evidence"),
        ("diagnosis/a.py", "import torch.nn", "diagnosis must not import torch"),
        ("workflows/a.py", "from rich.console import Console", "workflows must not import rich"),
        ("replay/a.py", "print(1)", "print"),
        ("replay/a.py", "import sys\nsys.stdout.write('x')", "sys.stdout"),
        ("attic/a.py", "", "attic is no room"),
        ("replay/a.py", "\n" * 701, "replay/a.py: 701 lines"),
        ("diagnosis/scan/a.py", "from ampdoctor.diagnosis.replay import x", "scan must not know replay"),
        ("diagnosis/catalogue.py", "from ampdoctor.diagnosis.scan import x", "must not know scan"),
        ("replay/a.py", "from ampdoctor.replay import b\n", "a circle: ampdoctor.replay.a -> ampdoctor.replay.b"),
    ],
)
def test_the_check_can_fail(file, code, sentence, tmp_path):
    package = tmp_path / "ampdoctor"
    target = package / file
    target.parent.mkdir(parents=True)
    target.write_text(code)
    target.with_name("b.py").write_text("from ampdoctor.replay.a import x" if file == "replay/a.py" else "")
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
        ("diagnosis/replay/a.py", "from ampdoctor.diagnosis.scan import x"),
        ("diagnosis/scan/a.py", "from ampdoctor.diagnosis.catalogue import x"),
    ],
)
def test_what_is_allowed_passes(file, code, tmp_path):
    package = tmp_path / "ampdoctor"
    target = package / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(code)
    assert violations(package) == []


HEAVY = """
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    if {heavy} & {{name.partition(".")[0] for name in sys.modules}}:
        sys.exit(f"{{module}} imports it")
"""


LIGHT = [
    "ampdoctor",
    "ampdoctor.evidence.report",
    "ampdoctor.diagnosis",
    "ampdoctor.gates.findings",
    "ampdoctor.reports.human",
    "ampdoctor.cli.main",
]


def imported(run_cli, modules, heavy):
    return run_cli(command=(sys.executable, "-c", HEAVY.format(modules=modules, heavy=heavy)))


def test_importing_it_does_not_import_torch(run_cli):
    done = imported(run_cli, LIGHT, {"torch", "numpy"})
    assert done.returncode == 0, done.stderr


def test_a_log_and_a_plan_are_read_without_torch(run_cli):
    """Its import takes seconds and hundreds of megabytes, the most of a second look at a log."""
    modules = ["ampdoctor.workflows.health", "ampdoctor.workflows.plan"]
    done = imported(run_cli, modules, {"torch"})
    assert done.returncode == 0, done.stderr


def test_the_core_does_not_import_the_command_line(run_cli):
    done = imported(run_cli, ["ampdoctor.workflows.requests"], {"typer", "rich"})
    assert done.returncode == 0, done.stderr
