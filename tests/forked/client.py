"""A Python that has torch imported already: `python -IS client.py SOCKET PROGRAM ARGUMENT...` is `python ARGUMENT...`.

The server at the socket forks (`server.py`); signals are handed to the fork, and this process ends as the fork does.
Where a fork would not do, for options of the interpreter or variables that it reads when it starts, Python itself runs.
PROGRAM is what does all this, and so the fork's `sys.executable`.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress


def open_files():
    """The numbers of the files that are open here."""
    return [int(name) for name in os.listdir("/proc/self/fd") if is_open(int(name))]  # noqa: PTH208 - pathlib takes long to import


def is_open(number):
    try:
        os.fstat(number)
    except OSError:  # the listing's own
        return False
    return True


def answer(place, program, options, arguments):
    """Have a fork run; return its exit code, or None where there is none for such a client."""
    files = open_files()
    umask = os.umask(0)
    os.umask(umask)
    asked = {
        "arguments": arguments,
        "deaf": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "environment": dict(os.environ),
        "files": files,
        "folder": os.getcwd(),  # noqa: PTH109
        "on_path": "-P" not in options,
        "program": program,
        "umask": umask,
        "unbuffered": "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED")),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        server.sendmsg([b"?"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        server.sendall(json.dumps(asked).encode() + b"\n")
        for number in (signal.SIGTERM,) if asked["deaf"] else (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
        code = server.recv(16)
    return int(code) if code else None


def main(place, program, *arguments):
    count = next((at for at, argument in enumerate(arguments) if argument not in {"-P", "-u"}), len(arguments))
    options, rest = arguments[:count], arguments[count:]
    forks = rest and (rest[0] in {"-m", "-c"} or not rest[0].startswith("-"))
    code = answer(place, program, options, rest) if forks else None
    if code is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
