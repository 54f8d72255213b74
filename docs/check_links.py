"""Every link of the built site leads somewhere, and every link of a page to a file of the repository too.

    python docs/check_links.py build/docs

Of links to other sites only the form is looked at; `make docs-linkcheck` asks the network. Exits 1 with a line for each
link that is broken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).parent
_ELSEWHERE = {"http", "https", "mailto", "data"}
_REFERENCES = {("a", "href"), ("link", "href"), ("img", "src"), ("script", "src")}
_MARKDOWN_LINK = re.compile(r"(?<!`)\[[^\]\n]+\]\(([^)\s]+)\)")


class _Page(HTMLParser):
    """What one page links to, and the names of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag, name) == ("a", "name")):
                self.places.add(value)
            elif value and (tag, name) in _REFERENCES:
                self.links.append(value)


def broken_links(site: Path) -> Iterator[str]:
    """A sentence for each link of a built site that leads to no file, or to no place in it."""
    pages = {path.resolve(): _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in _ELSEWHERE or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = f"{path.relative_to(site.resolve())}: {link}"
            if not target.is_file():
                yield f"{name} leads to no file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{name} leads to no place on that page"


def broken_sources(docs: Path) -> Iterator[str]:
    """A sentence for each relative link of a page's source whose file does not exist."""
    for path in sorted(docs.rglob("*.md")):
        for link in _MARKDOWN_LINK.findall(_without_code(path.read_text(encoding="utf-8"))):
            parts = urlsplit(link)
            if parts.scheme not in _ELSEWHERE and parts.path and not (path.parent / unquote(parts.path)).exists():
                yield f"{path.relative_to(docs)}: {link} leads to no file"


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def main(arguments: list[str]) -> int:
    """Print what is broken; 1 where something is, or where there is no site."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "index.html").is_file():
        sys.stderr.write("usage: python docs/check_links.py FOLDER, where `make docs` has built the site\n")
        return 1
    found = [*broken_links(Path(arguments[0])), *broken_sources(DOCS)]
    sys.stderr.write("".join(f"{sentence}\n" for sentence in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
