"""The columns of a CSV file that W&B exports from a chart: metrics of runs, with their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampdoctor.errors import CheckpointError

_RANGES = ("__MIN", "__MAX")
_BETWEEN = " - "  # separates the name of a run and that of a metric: "ruby-sun-12 - train/loss"
_LISTED = 4


def metrics_of(header: Sequence[str], name: str) -> Mapping[str, str]:
    """Returns the metric of each column, "" for ranges, {} for another table; CheckpointError for several runs."""
    ranges = {column for column in header if column.endswith(_RANGES)}
    found = {
        column: column.rpartition(_BETWEEN) for column in header if column + _RANGES[0] in ranges and _BETWEEN in column
    }
    if not found:
        return {}
    runs = list(dict.fromkeys(run for run, _, _ in found.values()))
    if len(runs) > 1:
        more = ", ..." if len(runs) > _LISTED else ""
        raise CheckpointError(
            f"{name} is W&B's export of {len(runs)} runs ({', '.join(runs[:_LISTED])}{more}), and a log is of one: "
            "export each by itself."
        )
    return dict.fromkeys(ranges, "") | {column: metric for column, (_, _, metric) in found.items()}
