"""How a notebook shows a report: a place that the package's front door fills.

A notebook asks the report itself (`_repr_html_`), and evidence must not know the rooms that stand on it. So the front
door, which may point at everything and runs before any room is entered, puts here what renders; nothing is loaded
before a notebook asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

show: Callable[[Any], str] | None = None
"""Takes a `Report`, returns a fragment of HTML; None shows nothing but the report's repr."""
