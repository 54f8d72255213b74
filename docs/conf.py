"""Sphinx's settings. `make docs` builds with -W -n: a warning, or a name that leads nowhere, is an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import llms_txt  # noqa: E402 - the folders stand in the path only now
import repository_links  # noqa: E402
import schema_page  # noqa: E402

import ampdoctor  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "ampdoctor"
author = "the ampdoctor developers"
project_copyright = "the ampdoctor developers; Apache-2.0"
version = release = ampdoctor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_ext"]
myst_heading_anchors = 3  # [text](page.md#heading) as on the pages of a forge

smartquotes = False  # "--format" is no dash
default_role = "code"  # `name` in a docstring

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a dataclass's attributes are in its docstring, and not once more as members

# Types in signatures that have no page here: torch's, the standard library's, and names that are private to a room.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|nn|os|collections|typing|pathlib|types|ampdoctor\.(workflows|checkpoints|replay|evidence|training)\..*|[A-Z]\w*).*",
    )
]

html_theme = "furo"
html_title = "ampdoctor"
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True  # a console block is commands and what they print


def setup(app: Sphinx) -> None:
    """What is made while building: the page of the JSON report, and llms.txt."""
    app.connect("source-read", schema_page.fill)
    app.connect("source-read", repository_links.plain)
    app.connect("build-finished", llms_txt.write)
