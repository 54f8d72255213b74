"""Links of a page to files of the repository outside docs/: on the site they are the file's name.

The pages are read in the repository as well, where such a link leads to its file. The site holds only docs/, and does
not know where the repository lies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?\)")


def plain(app: Any, page: str, source: list[str]) -> None:
    """Replace the links of one page; Sphinx calls this for every page that it reads."""
    folder = (Path(app.srcdir) / page).parent
    source[0] = _LINK.sub(lambda link: _shown(link, folder, Path(app.srcdir)), source[0])


def _shown(link: re.Match[str], folder: Path, docs: Path) -> str:
    target = (folder / link[2]).resolve()
    if target.is_relative_to(docs.resolve()):
        return link[0]
    name = target.relative_to(docs.resolve().parent).as_posix()
    return link[1] if name in link[1] else f"{link[1]} (`{name}`)"
