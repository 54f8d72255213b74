"""OpenMetrics: a text file that node_exporter picks up, or an endpoint on this machine that Prometheus asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ampdoctor.errors import OutputError
from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.openmetrics_text import OpenMetricsState
from ampdoctor.health.sinks.sink import Kind, RunFacts, Sink

_HERE = "127.0.0.1"
_TYPES = {
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
    False: "text/plain; version=0.0.4; charset=utf-8",
}


class _Exposed:
    """A run's state, under a lock where somebody may ask while it changes."""

    def __init__(self, facts: RunFacts) -> None:
        self._state = OpenMetricsState(facts)
        self._lock = threading.Lock()

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`."""
        with self._lock:
            self._state.log(metrics, step, time_ms)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - a count has neither
        """As in `Sink`."""
        with self._lock:
            self._state.alert(finding)

    def text(self, *, openmetrics: bool) -> str:
        """Returns the whole of it, as of now."""
        with self._lock:
            return self._state.text(time.time(), openmetrics=openmetrics)


class OpenMetricsFile(_Exposed):
    """Writes a file anew, completely or not at all: whoever reads it never sees a part.

    node_exporter reads `*.prom`, in Prometheus's own format and not in OpenMetrics; a file of another name is
    OpenMetrics.
    """

    def __init__(self, path: str, facts: RunFacts) -> None:
        super().__init__(facts)
        self._path = Path(os.path.realpath(path))  # what a link leads to is written, and the link stays
        self.flush()

    def flush(self) -> None:
        """As in `Sink`."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            beside.unlink(missing_ok=True)  # of a process that had this number, or a link that somebody has put there
            with beside.open("x", encoding="utf-8") as file:  # "x" follows no link
                file.write(self.text(openmetrics=self._path.suffix != ".prom"))
            beside.replace(self._path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    def close(self) -> None:
        """As in `Sink`; the last state stays."""
        self.flush()


class OpenMetricsEndpoint(_Exposed):
    """Answers whoever asks on this machine, as long as the run lasts, in the format that is asked for."""

    def __init__(self, port: int, facts: RunFacts) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        super().__init__(facts)
        exposed = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = "application/openmetrics-text" in self.headers.get("Accept", "")
                known = self.path.partition("?")[0] in {"/metrics", "/"}
                body = exposed.text(openmetrics=wanted).encode() if known else b"ask for /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", _TYPES[wanted] if known else "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nobody is told who asked."""

        try:
            self._server = ThreadingHTTPServer((_HERE, port), Handler)
        except OSError as error:
            raise OutputError(f"nobody can be answered at {_HERE}:{port}: {error.strerror}") from None
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def flush(self) -> None:
        """As in `Sink`; who asks gets it."""

    def close(self) -> None:
        """As in `Sink`."""
        self._server.shutdown()
        self._server.server_close()


def _begin(target: str, facts: RunFacts) -> Sink:
    return OpenMetricsEndpoint(int(target[1:]), facts) if _is_port(target) else OpenMetricsFile(target, facts)


def _is_port(target: str) -> bool:
    return target.startswith(":")


def _writes(target: str, _run: str) -> tuple[str, ...]:
    return (target,)


def _refuse(target: str) -> str | None:
    port = target[1:]
    if _is_port(target) and not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        return f"{target} is no port: write :9105, or a file"
    return None


KIND = Kind(
    name="openmetrics",
    target="FILE|:PORT",
    help="For Prometheus: a file for node_exporter (*.prom) or in OpenMetrics, or an endpoint on 127.0.0.1.",
    begin=_begin,
    is_path=True,
    writes=_writes,
    refuse=_refuse,
    is_endpoint=_is_port,
)
