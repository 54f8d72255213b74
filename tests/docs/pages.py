"""The code of a page of docs/, run from top to bottom in a folder of its own; a comment before a block says how.

    <!-- file: train.py -->             the block is this file
    <!-- run -->                        a console block: its commands are run, what follows them is their output
    <!-- run: exit 1 -->                the last command ends with this code; the others, and without it all, with 0
    <!-- run: until "A"; from "B" -->   the lines from the first that starts with A up to the first with B are "..."
    <!-- run -->                        a python block: a script that must end well
    <!-- not run: reason -->            the exception

Somewhere on the page: `<!-- needs: transformers, accelerate -->`, and `<!-- slow -->` where it takes minutes rather
than seconds. `python tests/docs/pages.py [PAGE ...]` writes the outputs of these pages anew, or of all for which
nothing is missing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tests.arithmetic import ALIKE  # noqa: E402

DOCS = ROOT / "docs"
WIDTH = 100
TIMEOUT_S = 300
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_RUN = re.compile(r'run(?::(?: exit (?P<code>\d+))?;?(?: until "(?P<until>[^"]+)")?;?(?: from "(?P<resumed>[^"]+)")?)?')
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page: its mark ("" without one), its language and its text, and where the text lies."""

    mark: str
    language: str
    text: str
    span: tuple[int, int]

    @property
    def is_run(self) -> bool:
        return _RUN.fullmatch(self.mark) is not None


def pages() -> list[Path]:
    """Every page of docs/ that was written by hand."""
    return [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "rules"]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(mark=found["mark"] or "", language=found["language"], text=found["text"], span=found.span("text"))
        for found in _BLOCK.finditer(text)
    ]


def missing(text: str) -> list[str]:
    """The packages that a page needs and that are not installed."""
    named = re.search(r"^<!-- needs: (.*) -->$", text, re.MULTILINE)
    return [name for name in (named[1].split(", ") if named else []) if importlib.util.find_spec(name) is None]


def is_slow(text: str) -> bool:
    return "<!-- slow -->" in text


def rewritten(text: str, folder: Path, python: str = sys.executable) -> str:
    """The page with the outputs that its commands give now.

    Args:
        text: The page.
        folder: Empty; the page's files are written and its commands are run here.
        python: The program that runs Python.

    Raises:
        AssertionError: A command ended with another code than the page says; its streams are in the message.
    """
    (folder / ".bin").mkdir()
    for name, arguments in (("python", ""), ("ampdoctor", "-m ampdoctor")):
        (folder / ".bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(python)} {arguments} "$@"\n')
        (folder / ".bin" / name).chmod(0o755)
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    parts, end = [], 0
    for block in blocks(text):
        parts.append(text[end : block.span[0]])
        parts.append(_carried_out(block, folder))
        end = block.span[1]
    return "".join([*parts, text[end:]])


def _carried_out(block: Block, folder: Path) -> str:
    if block.mark.startswith("file: "):
        path = folder / block.mark.removeprefix("file: ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    elif block.is_run and block.language == "python":
        (folder / "_block.py").write_text(block.text, encoding="utf-8")
        _run("python _block.py", folder, expected=0)
    elif block.is_run:
        return _console(block, folder)
    return block.text


def _console(block: Block, folder: Path) -> str:
    options = _RUN.fullmatch(block.mark)
    commands = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    shown = []
    for number, command in enumerate(commands, 1):
        is_last = number == len(commands)
        lines = _run(command, folder, expected=int(options["code"] or 0) if is_last else 0).splitlines()
        if is_last and options["until"]:
            cut = _first(lines, options["until"])
            rest = lines[_first(lines, options["resumed"]) :] if options["resumed"] else []
            lines = [*lines[:cut], "...", *rest]
        shown += [f"$ {command}", *lines]
    return "".join(f"{line}\n" for line in shown)


def _first(lines: list[str], start: str) -> int:
    """The number of the first line that starts so."""
    found = [number for number, line in enumerate(lines) if line.startswith(start)]
    assert found, f"no line starts with {start!r}:\n" + "\n".join(lines)
    return found[0]


def _run(command: str, folder: Path, expected: int) -> str:
    """What a command writes to standard output, as on a terminal of the pages' width without colour."""
    kept = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "TTY_COMPATIBLE", "CI"}}
    env = kept | {
        "PATH": os.pathsep.join([str(folder / ".bin"), kept.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")])),
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        **ALIKE,
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == expected, f"{command}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def same(shown: str, made: str) -> bool:
    """Whether two texts have the same words, whatever the folding and the build of torch; numbers to 2 % of each other.

    What the build of torch computes differs in its last bits. How often steps were replayed and what a watch
    took are costs, and no claims.
    """
    left, right = _words(shown), _words(made)
    return len(left) == len(right) and all(map(_same_word, left, right))


def _words(text: str) -> list[str]:
    text = re.sub(r"\breplays \d+", "replays N", re.sub(r"torch \S+,", "torch X,", text))
    return re.sub(r"the watch took .*? % of", "the watch took N % of", text).split()


def _same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    if _NUMBER.sub("#", left) != _NUMBER.sub("#", right):
        return False
    pairs = zip(_NUMBER.findall(left), _NUMBER.findall(right), strict=True)
    return all(abs(float(a) - float(b)) <= 0.02 * max(abs(float(a)), abs(float(b))) for a, b in pairs)


def main(names: list[str]) -> None:
    for page in [Path(name).resolve() for name in names] or pages():
        text = page.read_text(encoding="utf-8")
        if not missing(text):
            with tempfile.TemporaryDirectory() as folder:
                page.write_text(rewritten(text, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
