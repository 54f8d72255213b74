"""llms.txt beside the built pages: a line for each page, so that a program finds the one that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIRST = "agents"  # before all others: the page that is written for programs


def write(app: Any, error: Exception | None) -> None:
    """Write the file; Sphinx calls this when a build has ended."""
    if error is None and app.builder.format == "html":
        pages = sorted(app.env.found_docs, key=lambda page: (page != FIRST, page.startswith("rules/"), page))
        lines = ["# ampdoctor", "", f"> {_first_sentence(app, 'index')}", "", "## Pages", ""]
        lines += [
            f"- [{_title(app, page)}]({app.builder.get_target_uri(page)}): {_first_sentence(app, page)}"
            for page in pages
        ]
        Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _title(app: Any, page: str) -> str:
    return str(app.env.titles[page].astext())


def _first_sentence(app: Any, page: str) -> str:
    paragraph = next((node for node in app.env.get_doctree(page).findall() if node.tagname == "paragraph"), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return text.partition(". ")[0].rstrip(".:") + "."
