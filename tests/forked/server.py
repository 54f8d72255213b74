"""Run command lines of Python as forks of one process that has torch and ampdoctor imported: `python server.py SOCKET`.

Importing torch takes seconds, a fork milliseconds. A fork is given the folder, environment, open files and arguments of
a process of its own, and ends like one; `client.py` asks for it. The server ends when its standard input does.
"""

from __future__ import annotations

import array
import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).parents[2])
SET_BY_OTHERS = "PYTHONPATH$|PYTHONUNBUFFERED$|TORCHINDUCTOR_|TORCHELASTIC_|TORCH_NCCL_"
READ_ONCE = re.compile(f"(?!{SET_BY_OTHERS})(PYTHON|TORCH|OMP_|MKL_|CUDA_VISIBLE|LD_|LANG|LC_)")
"""Variables that Python or a library reads when it starts: a client whose own differ from the server's gets no fork.

Not those that libraries set in whoever imports them (torch's compiler, scikit-learn): tests before it may have done so;
nor those that torchrun gives to each of a job's processes, which are read when the process group is made. torchrun's
`-u`, and the variable that is the same, a fork's streams follow.
"""
NOT_LOADED = ("__main__", "pytest_plugin", "pytest_guard", "integrations.hf_trainer", "integrations.lightning")
MOST_FILES = 253  # that Linux lets one message carry


def load():
    """Import what takes long, and keep the collector from writing to the memory that forks share."""
    sys.path.insert(0, ROOT)
    for module in pkgutil.walk_packages([f"{ROOT}/ampdoctor"], "ampdoctor."):
        if not module.name.endswith(NOT_LOADED):
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # the first replay imports it
    importlib.import_module("pydantic")  # Typer imports it for the first command line
    # what Typer makes of the program, which it does once in a process
    main = importlib.import_module("typer.main")
    main.get_command = functools.cache(main.get_command)
    main.get_command(importlib.import_module("ampdoctor.cli.main").app)
    sys.path.remove(ROOT)
    gc.collect()
    gc.freeze()


def serve(listener, own):
    """Answer clients; return in a fork, with what it is asked to be, and the client's files by their numbers.

    A client's signals are handed to its fork, and the fork's exit code to the client; without a client, a fork ends.

    Args:
        own: The variables read once, as they were then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks = {}
    while True:
        ready, _, _ = select.select([listener, 0, *chain(*forks.values())], [], [])
        if 0 in ready:
            sys.exit()
        for pid, (client, end) in list(forks.items()):
            if end in ready:
                client.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                client.close()
                os.close(end)
                del forks[pid]
            elif client in ready:
                number = client.recv(1)
                os.kill(pid, number[0] if number else signal.SIGKILL)
        if listener in ready:
            client, _ = listener.accept()
            asked, files = received(client)
            pid = os.fork() if read_once(asked["environment"]) == own else None
            if pid == 0:
                return asked, files
            for file in files.values():
                os.close(file)
            if pid is None:
                client.close()
            else:
                forks[pid] = client, os.pidfd_open(pid)


def read_once(environment):
    return {name: value for name, value in environment.items() if READ_ONCE.match(name)}


def received(connection):
    files = array.array("i")
    _, messages, *_ = connection.recvmsg(1, socket.CMSG_SPACE(MOST_FILES * files.itemsize))
    for *_, content in messages:
        files.frombytes(content)
    with connection.makefile("rb") as reading:
        asked = json.loads(reading.readline())
    return asked, dict(zip(asked["files"], files, strict=True))


def become(asked, files):
    """Take over the client's files, folder and environment."""
    above = max([*files, *files.values(), 2]) + 1
    for number, file in files.items():
        os.dup2(file, above + number)
    os.closerange(0, above)
    for number in files:
        os.dup2(above + number, number)
        os.close(above + number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = opened(number, getattr(sys, name), through=asked["unbuffered"]) if number in files else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    sys.executable = asked["program"]
    os.environ.clear()
    os.environ.update(asked["environment"])
    if not asked["deaf"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def opened(number, like, *, through):
    """A standard stream as Python makes it."""
    binary = open(number, like.mode + "b", 0 if through else -1, closefd=False)  # noqa: SIM115
    by_line = not through and (binary.isatty() or number == 2)
    stream = TextIOWrapper(binary, like.encoding, like.errors, "\n", line_buffering=by_line, write_through=through)
    stream.mode, getattr(binary, "raw", binary).name = like.mode, like.name
    return stream


def run(how, *rest, on_path):
    """Do what the interpreter does with such arguments.

    Args:
        how: "-m", "-c", or the path of a file.
        rest: The arguments after it.
        on_path: Whether to import from where the code is; False is `python -P`.
    """
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.excepthook = show_without_server
    places = {"-m": os.getcwd(), "-c": ""}  # noqa: PTH109
    if on_path:
        sys.path.insert(0, places.get(how, str(Path(how).resolve().parent)))
    if how == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = [how, *rest]
        main.__file__ = how
        code = compile(Path(how).read_bytes(), how, "exec")
    exec(code, main.__dict__)


def show_without_server(kind, error, traceback):
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


class Ending:
    """Spares forks the end of the interpreter after its exit handlers: torch taken apart takes longer than all else.

    An end that is more than an exit code, Ctrl-C or a text for stderr or a stream that cannot be written, is Python's.
    """

    def __init__(self):
        self._code = None
        self._leave = os._exit  # the function that the code of a fork has not replaced
        atexit.register(self._quickly)  # registered first, called last

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        if kind in {None, SystemExit}:
            code = getattr(error, "code", None)
            self._code = 0 if code is None else code
        elif issubclass(kind, Exception):
            self._code = 1

    def _quickly(self):
        if isinstance(self._code, int):
            with suppress(OSError, ValueError):
                for stream in filter(None, (sys.stdout, sys.stderr)):
                    stream.flush()
                self._leave(self._code)


if __name__ == "__main__":
    server = sys.modules["__main__"]  # which is to outlive its place
    del sys.path[0]
    ending = Ending()
    own = read_once(os.environ)  # before torch adds some
    load()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        os.write(1, b"ready\n")
        given = serve(listener, own)
    become(*given)
    with ending:
        run(*given[0]["arguments"], on_path=given[0]["on_path"])
