"""What a log may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a log.

    Attributes:
        file_bytes: From here on a new file is begun. A file of this size is read in a second.
        detail_bytes: Of details in finished files, from where on old ones are thinned. Steps are kept: a million have
            some 150 MB.
        lines: Lines that wait at most, but for details: of a step in 1 ms those of 20 seconds, in some 10 MB.
        details: Details that wait at most; each may hold a histogram of every tensor.
        last: Steps that are remembered for a bundle.
        hung_seconds: A sink that has not taken a line for so long is given up: a network's disk may pause for seconds.
        heard_details: Lines of details that wait at most for a listener, of up to 100 kB each; of others `lines`.
        farewell_seconds: How long listeners have at the end, all of them together: a server of metrics wants its rest.
    """

    file_bytes: int = 16 * 1024 * 1024
    detail_bytes: int = 512 * 1024 * 1024
    lines: int = 20_000
    details: int = 16
    last: int = 256
    hung_seconds: float = 30.0
    heard_details: int = 64
    farewell_seconds: float = 10.0
