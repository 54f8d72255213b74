"""A curve in one line of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_LEVELS, _PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_NONFINITE, _PLAIN_NONFINITE = "\N{MULTIPLICATION SIGN}", "!"


def sparkline(values: Sequence[float | None], width: int, *, logarithmic: bool = False, plain: bool = False) -> str:
    """Returns the last or all of the values, a character for one or more of them; a space where none is known.

    A character stands for the median of its values, or says that one of them is not finite: an overflow among a
    thousand good steps is seen.

    Args:
        values: In order; None where there is none.
        width: Characters at most.
        logarithmic: Levels are equal ratios; what is not positive is then on the lowest.
        plain: ASCII only.
    """
    if width < 1 or not values:
        return ""
    columns = min(width, len(values))
    cells = [values[len(values) * at // columns : len(values) * (at + 1) // columns] for at in range(columns)]
    heights = [_height(cell, logarithmic=logarithmic) for cell in cells]
    known = [height for height in heights if height is not None and math.isfinite(height)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    levels, nonfinite = (_PLAIN_LEVELS, _PLAIN_NONFINITE) if plain else (_LEVELS, _NONFINITE)
    line = []
    for height in heights:
        if height is None:
            line.append(" ")
        elif math.isnan(height):
            line.append(nonfinite)
        else:
            share = (height - low) / (high - low) if high > low and math.isfinite(height) else 0.0
            line.append(levels[min(int(share * len(levels)), len(levels) - 1)])
    return "".join(line)


def _height(cell: Sequence[float | None], *, logarithmic: bool) -> float | None:
    """The height of a column: NaN where a value of it is not finite, None where there is none."""
    known = [value for value in cell if value is not None]
    if not known:
        return None
    if not all(map(math.isfinite, known)):
        return math.nan
    value = statistics.median(known)
    if not logarithmic:
        return value
    return math.log2(value) if value > 0.0 else -math.inf
