"""How a notebook shows a report: the package's `__init__` sets a function here.

A notebook calls the report's `_repr_html_`, and `evidence` must not import higher packages. The package's `__init__`
may import everything and runs first, so it sets the renderer here; nothing is loaded before a notebook needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

show: Callable[[Any], str] | None = None
"""Takes a `Report`, returns a fragment of HTML; with None, a notebook shows only the report's repr."""
