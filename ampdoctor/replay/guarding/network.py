"""Closes the network, and the starting of other programs, while a library makes what a stranger's file describes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LEAVES = frozenset(
    {
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendto",
        "socket.sendmsg",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.startfile",
        "os.system",
        "pty.spawn",
        "subprocess.Popen",
    }
)
"""Python's audit events of what leaves the process: a name is looked up, a peer is reached, a program is started."""


class _ClosedError(ConnectionError):
    """What a library is told that asks for the network here: libraries know it as being offline."""


@contextmanager
def network_closed() -> Iterator[list[str]]:
    """Refuse every connection and every program of the process while the body runs.

    Python's audit events say of them, from whichever function and thread. The refusal is a `ConnectionError`, which
    libraries take for a machine that is offline: many go on without what they asked for.

    Yields:
        What was asked for, in the order in which it was, as ends of a sentence ("the network (huggingface.co)");
        filled while the body runs.
    """
    asked: list[str] = []
    _Hook.install()
    before, _Hook.asked = _Hook.asked, asked
    try:
        yield asked
    finally:
        _Hook.asked = before


class _Hook:
    """The audit hook; there is one per process, because Python takes none out again."""

    installed = False
    asked: list[str] | None = None

    @classmethod
    def install(cls) -> None:
        if not cls.installed:
            cls.installed = True
            sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...], hook: type[_Hook] = _Hook, leaves: frozenset[str] = _LEAVES) -> None:
    if hook.asked is None or event not in leaves:  # default arguments: this outlives the module's names at the end
        return
    said = _said(event, arguments)
    hook.asked.append(said)
    raise _ClosedError(f"{said} is closed while a bundle's model is made")


def _said(event: str, arguments: tuple[Any, ...]) -> str:
    if not event.startswith("socket."):
        return "the starting of another program"
    address = arguments[1] if event in ("socket.connect", "socket.sendto", "socket.sendmsg") else arguments[:1]
    host = address[0] if isinstance(address, tuple) and address else address
    host = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return f"the network ({host[:80]})"
