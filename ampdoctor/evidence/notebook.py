"""How a notebook shows a report: the package's front door sets a function here.

A notebook asks the report itself (`_repr_html_`), and evidence must not know the rooms above it. The front door may
import everything and runs before any room is entered, so it sets the renderer here; nothing is loaded before a notebook
asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

show: Callable[[Any], str] | None = None
"""Takes a `Report`, returns a fragment of HTML; with None, a notebook shows only the report's repr."""
