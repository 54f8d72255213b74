"""What a form for people must say of a report: every text of every block of its outline."""

from __future__ import annotations

import html
import json
import re

from markdown_it import MarkdownIt

from ampdoctor.reports.blocks import Code, Fold, Heading, Pairs, Table, Text, without_empty
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import RenderOptions, renderer
from ampdoctor.reports.human import plain_text
from ampdoctor.reports.outline import outline

FORMS = ("human", "markdown", "html")


def unsaid(report, form):
    """Return the texts of the report's outline that the form lacks, without what folds a line or lays it out."""
    said = outline(report)
    wanted = texts([*said.head, *said.findings, *without_empty(said.sections), said.next], form)
    there = seen(form, report)
    return sorted({part for part in wanted if "".join(sanitise(part).split()).casefold() not in there})


def texts(blocks, form):
    """Yield what blocks say; of rows that a script of the page shows, the parts of the name, which its data has."""
    for block in blocks:
        match block:
            case Heading(level=1) if form == "html":  # its title is another one; what was examined is said in a fold
                yield from re.split(r", (?:step )?| \(measured from |\)$", block.text.partition(": ")[2])
            case Heading():
                yield block.text
            case Text():
                yield from of_line(block)
            case Pairs():
                for label, line in block.rows:
                    yield from (label, *of_line(line))
            case Table() if block.scripted and form == "html":
                yield from (part for row in block.rows for part in re.split(r"[.:]", row[0]))
            case Table():
                yield from (part for row in (block.head, *block.rows) for cell in row for part in of_line(cell))
            case Code():
                yield from (block.title, *block.lines)
            case Fold():
                yield from of_line(block.title) if block.blocks else ()
                yield from texts(without_empty(block.blocks), form)


def of_line(line):
    return (line,) if isinstance(line, str) else (line.label, line.text)


def seen(form, report):
    text = renderer(form)(report, RenderOptions(width=400, color="never", verbose=1))
    if form == "markdown":
        text = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    if form != "human":
        data = re.search(r'id="report-data">(.*?)</script>', text)
        text = html.unescape(re.sub(r"(?s)<style>.*?</style>|</?[a-z][^>]*>", "", text))
        text += " ".join(strings(json.loads(data[1]))) if data is not None else ""
    return "".join(text.split()).casefold()


def strings(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for item in inner for text in strings(item)]


def pasted(report):
    """Return the lines to paste of all findings."""
    code = [block for finding in outline(report).findings for block in getattr(finding, "blocks", ())]
    return {line.strip() for block in code if isinstance(block, Code) for line in block.lines}


def unclear(report):
    """Return what of the findings on a console of 100 columns is long, or not plain at once.

    A finding takes eight lines; where the lines to paste, which are always whole, are many, six besides them.
    """
    text = plain_text(report, quiet=True)
    found, own = [], pasted(report)
    for part in text.split("\n\n"):
        shown = [line for line in part.splitlines() if line[:3] != "-v:"]
        paste = sum(line.strip() in own for line in shown)
        found += [part] if len(shown) > max(8, paste + 6) else []
    found += [line for line in text.splitlines() if len(line) > 100]
    firsts = [block.title.text for block in outline(report).findings if isinstance(block, Fold) and block.style]
    found += [line for line in firsts if "aten." in line or len(line.split()) > 25]
    return found + re.findall(r"\bbinades?\b", plain_text(report, verbose=1))
