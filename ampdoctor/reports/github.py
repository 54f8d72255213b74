"""Two renderers for GitHub: annotations, and Markdown for step summaries and comments.

Annotations are workflow commands that a step prints (`::error file=...,line=...::...`). GitHub shows ten of a kind for
a step and silently drops the others, so at most ten are made, the worst first, and the last one says how many more
there are. One more line, which is no command, gives the verdict for readers of the log. Escapes: docs.github.com,
"Workflow commands", as the runner decodes them (ActionCommand.cs).

GitHub drops a step's summary above 1 MiB, so the Markdown ends at 900 kB, between two blocks or rows, with a line that
says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ampdoctor.evidence.paths import checkpoint_path, file_within
from ampdoctor.evidence.report import ErrorNote, Finding, Report, Severity
from ampdoctor.reports import text as words
from ampdoctor.reports.blocks import Block, Code, Fold, Heading, Line, Pairs, Table, Text, without_empty
from ampdoctor.reports.escape import code, fence, header, prose, row, sanitise
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.outline import outline
from ampdoctor.reports.text import Location, in_repository, location_of, target_file

MAX_ANNOTATIONS = 10
_MAX_FILES = 4
"""Files with an annotation of their own that were not examined; the others share one."""
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".json", ".distcp", ".metadata")
"""How files of checkpoints end: what was not examined may also be a tensor."""
_TOLD = ("where", "change", "proof")
_LEVELS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def render_github(report: Report, _: RenderOptions | None = None) -> str:
    """Return workflow commands, one a line, and a line with the verdict."""
    unanswered = list(_without_answer(report))
    found = report.findings[: MAX_ANNOTATIONS - len(unanswered)]
    rest = len(report.findings) - len(found)
    more = [f"and {rest} more: the whole report has them"] if rest else []
    told = [_of_finding(one, report, more if at == len(found) else ()) for at, one in enumerate(found, 1)]
    return "".join([*unanswered, *told]) + f"ampdoctor {report.command}: {sanitise(words.verdict(report))}\n"


def _without_answer(report: Report) -> Iterator[str]:
    """Yield what could not be examined or settled; it comes before the findings, since it decides the exit code."""
    about = Location(target_file(report.target))
    if not report.complete:
        by_file: dict[str, list[str]] = {}
        for error in report.errors:
            file = _file_of(error, report.target) if report.command == "scan" else about.file
            file = file if file in by_file or len(by_file) < _MAX_FILES else about.file
            by_file.setdefault(file, []).append(f"{error.what} ({error.kind}): {error.message}")
        for file, parts in by_file.items():
            yield _command("error", Location(file), "ampdoctor: not examined", parts, report.target)
    if report.verdict in ("not_reproduced", "inconclusive"):
        yield _command("error", about, "ampdoctor: no answer", [words.verdict(report)], report.target)


def _file_of(error: ErrorNote, target: Mapping[str, Any]) -> str:
    """Return the file of a scan that was not examined; for a tensor, or several files, the whole checkpoint."""
    whole = target_file(target)
    one_file = whole.endswith(_FILES) and not whole.endswith(".json")
    if one_file or not error.what.endswith(_FILES) or " + " in error.what:
        return whole
    return file_within(checkpoint_path(target), error.what)


def _of_finding(finding: Finding, report: Report, more: Iterable[str]) -> str:
    said = [finding.message, *(f"{at}: {line}" for at, line in words.told(finding).items() if at in _TOLD), *more]
    at, title = location_of(finding, report.target), f"{finding.code} {finding.name}"
    return _command(_LEVELS[finding.severity], at, title, said, report.target)


def _command(level: str, at: Location, title: str, message: Iterable[str], target: Mapping[str, Any]) -> str:
    placed = in_repository(at, target)
    known = {"file": placed.file, "line": placed.line, "title": title}
    properties = ",".join(f"{key}={_property(str(value))}" for key, value in known.items() if value is not None)
    return f"::{level} {properties}::{_data(chr(10).join(map(sanitise, message)))}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(sanitise(text)).replace(":", "%3A").replace(",", "%2C")


# -- Markdown --

MAX_BYTES = 900_000
_TRUNCATED = "\n**Truncated here: the rest is more than GitHub shows; `--report json=FILE` has all of it.**\n"
_END = "\n</details>\n"
_LIST_MARK = re.compile(r"(?:[-=+*]|\d+[.)])(?= |$)")
"""What makes a list of a paragraph that begins with it."""


def render_markdown(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as GitHub-flavoured Markdown of at most 900 kB."""
    said = outline(report)
    room = MAX_BYTES - len(_TRUNCATED)
    kept: list[str] = []
    depth = 0
    for piece, after in _pieces([*said.head, said.next, *said.findings, *without_empty(said.sections)], 0):
        room -= len(piece.encode())
        if room < len(_END) * max(depth, after):
            return "".join([*kept, _END * depth, _TRUNCATED])
        kept.append(piece)
        depth = after
    return "".join(kept)


def _pieces(blocks: Sequence[Block], depth: int) -> Iterator[tuple[str, int]]:
    """Yield parts between which the text may end, each with the number of folds that are open behind it."""
    for block in blocks:
        match block:
            case Heading():
                yield f"\n{'#' * (block.level + 1)} {prose(block.text)}\n", depth
            case Text():
                yield f"\n{_paragraph(block)}\n", depth
            case Pairs():
                for index, (label, line) in enumerate(block.rows):
                    named = f"**{prose(label.strip())}**: " if label.strip() else ""
                    yield f"{'' if index else chr(10)}- {named}{_line(line) if named else _paragraph(line)}\n", depth
            case Table():
                head = "\n" + header(*map(prose, block.head))
                for cells in block.rows:  # the head comes with the first row
                    yield head + row(map(_line, cells)), depth
                    head = ""
            case Code():
                title = f"\n{_paragraph(f'{block.title}:')}\n" if block.title else ""
                yield f"{title}\n{fence(block.lines, block.language)}\n", depth
            case Fold():
                summary = _line(block.title, html=True)
                yield f"\n<details{' open' if block.open else ''}><summary>{summary}</summary>\n", depth + 1
                yield from _pieces(without_empty(block.blocks), depth + 1)
                yield _END, depth


def _paragraph(line: Line) -> str:
    text = line if isinstance(line, str) else line.text
    mark = _LIST_MARK.match(text)
    if mark is None or (isinstance(line, Text) and line.label):
        return _line(line)
    marks = "**" if isinstance(line, Text) and line.style == "strong" else ""
    return f"{marks}{code(mark[0])}{prose(text[mark.end() :].rstrip())}{marks}"


def _line(line: Line, *, html: bool = False) -> str:
    if isinstance(line, str):
        return prose(line, html=html)
    marks = ("<strong>", "</strong>") if html else ("**", "**")
    if line.label:
        label = f"{marks[0]}{prose(line.label.strip(), html=html)}{marks[1]}"
        return f"{label} {prose(line.text, html=html)}" if line.text else label
    said = prose(line.text.strip(), html=html)
    return f"{marks[0]}{said}{marks[1]}" if line.style == "strong" and said else said
