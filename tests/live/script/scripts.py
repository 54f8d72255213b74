"""Small scripts, each about one thing that Python does with a script; their output is to be the same under a watch."""

from __future__ import annotations

WORLD = """
import atexit, gc, locale, logging, os, signal, sys, threading, warnings
plain = ("__file__", "__cached__", "__name__", "__package__", "__spec__", "__doc__", "__annotations__")
print({name: value if name in plain else type(value) for name, value in list(globals().items())})
print(sys.argv, sys.path, __loader__.name, __loader__.path, sys._getframe().f_code.co_filename)
print(sys.modules["__main__"].__dict__ is globals(), __import__("__main__") is sys.modules["__main__"])
print({number: str(signal.getsignal(number)) for number in signal.valid_signals()})
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, threading.excepthook)
print(sys.unraisablehook is sys.__unraisablehook__, sys.gettrace(), sys.getprofile(), sys.flags)
for stream, first in ((sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
    print(stream is first, stream.fileno(), stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
print([thread.name for thread in threading.enumerate()], gc.isenabled(), gc.get_freeze_count())
print(gc.get_threshold(), gc.callbacks)
print(sorted(os.environ.items()), warnings.filters, logging.root.handlers, locale.getlocale(), os.umask(0))
finders = [one for one in sys.meta_path if not type(one).__module__.startswith("ampdoctor")]  # waits for torch
print([getattr(finder, "__name__", type(finder)) for finder in finders], os.getcwd())
print(sys.getswitchinterval(), sys.getrecursionlimit())
print([name for name in ("torch", "numpy", "rich") if name in sys.modules], sys.warnoptions, sys.dont_write_bytecode)
"""
CHAINED = """
import contextlib
def inner():
    raise KeyError("inner")
def middle():
    try:
        inner()
    except KeyError as error:
        raise ValueError("middle") from error
try:
    middle()
except ValueError:
    [][1]
"""
EXITS = """
import sys
class Odd:
    def __str__(self):
        return "odd \\u00e9"
codes = {"3": 3, "text": "text", "none": None, "true": True, "256": 256, "-1": -1, "odd": Odd()}
raise SystemExit(codes[sys.argv[1]])
"""
HOOK = """
import sys
def hook(kind, error, trace):
    print("hooked", kind.__name__, error, trace.tb_lineno, trace.tb_next, file=sys.stderr)
    print(sys.last_type is kind, sys.last_value is error, sys.last_traceback is trace)
    if sys.argv[1] == "exit":
        sys.exit(7)
sys.excepthook = hook
1 / 0
"""
INTERRUPTED = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "at exit", flush=True)
threading.Thread(target=lambda: (time.sleep(0.05), print("thread", flush=True))).start()
if sys.argv[1] == "twice":
    signal.signal(signal.SIGINT, lambda number, frame: print("handled", number))
    os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
finally:
    print("cleaned up")
"""
TERMINATED = """
import os, signal, sys
if sys.argv[1] == "handled":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
print("before", flush=True)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""
LATE = """
import atexit, sys, threading, time
class Last:
    def __del__(self):
        print("deleted", __name__)
last = Last()
atexit.register(print, "first registered")
atexit.register(print, "second registered")
def fails():
    time.sleep(0.05)
    raise RuntimeError("in a thread")
threading.Thread(target=fails, name="worker").start()
print("end")
"""
OBJECTS = """
import dataclasses, inspect, io, linecache, pickle, pickletools, sys, typing, warnings
@dataclasses.dataclass
class Net:
    width: "int" = 3
    next: "Net | None" = None
data = pickle.dumps(Net())
print(b"__main__" in data, pickle.loads(data), Net.__module__, typing.get_type_hints(Net))
print(inspect.getsource(Net), inspect.getsourcefile(Net), linecache.getline(__file__, 2), inspect.getmodule(Net))
warnings.warn("mine")
warnings.warn("old", DeprecationWarning)
import argparse
print(sys.stdin.read())
print("caf\\u00e9")
argparse.ArgumentParser().parse_args()
"""
SYNTAX = "def broken(:\n    pass\n"
PROCESSES = """
import multiprocessing, sys
class Item:
    def __init__(self, value):
        self.value = value
def double(item):
    return Item(item.value * 2), __name__, sys.argv[1:], multiprocessing.current_process().name
print("top level", __name__, flush=True)
if __name__ == "__main__":
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            for item, *said in pool.map(double, [Item(1)]):
                print(method, item.value, said, type(item) is Item)
"""
FORKED = """
import os, sys
child = os.fork()
if child:
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print("in the child")
    if sys.argv[1] == "exit":
        sys.exit(3)
    if sys.argv[1] == "raise":
        raise ValueError("in the child")
"""
LEFT = "import os\nprint('flushed', flush=True)\nprint('lost')\nos._exit(5)\n"
FLOOD = "import sys\nfor _ in range(100_000):\n    print('line')\n"
MODULE = """
import sys
print(__name__, __package__, __file__, __cached__, __spec__.name, __spec__.origin, sys.argv, sys.path, list(globals()))
from . import sibling
raise ValueError(sibling.NAME)
"""
WORKERS = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        assert __name__ == sys.argv[2] or __name__ == "__main__", __name__
        return torch.full((4,), float(at * at)), os.getpid()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)
    def forward(self, x):
        return self.out(nn.functional.dropout(x, 0.5))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Squares(), batch_size=2, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[1])
    for epoch in range(2):
        for batch, worker in loader:
            assert os.getpid() not in worker.tolist()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            print(float(loss).hex())
    torch.save(model, "model.pt")
    print(type(torch.load("model.pt", weights_only=False)) is Net, torch.get_num_threads())
    print([p.flatten().tolist() for p in model.parameters()], torch.get_rng_state().sum())
"""
