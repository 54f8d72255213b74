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
GROUP = """
def fails(n):
    raise ValueError(n)
errors = []
for n in range(2):
    try:
        fails(n)
    except ValueError as error:
        errors.append(error)
raise ExceptionGroup("both", errors)
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
LATIN = '# -*- coding: latin-1 -*-\nprint(ascii("caf\xe9"))\nraise ValueError("caf\xe9")\n'.encode("latin-1")
SYNTAX = "def broken(:\n    pass\n"
INDENT = "if True:\nprint(1)\n"
ANNOTATED = """
def f(x: 1 + 1): ...
print(f.__annotations__, __annotations__)
y: 3 = 1
print(__annotations__)
"""
IMPORTS = "import broken_neighbour\n"
NEIGHBOUR = "def fails():\n    raise OSError('at import')\nfails()\n"
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
ARCHIVED = (
    "import sys\nprint(__name__, __package__, __file__, __spec__.name, sys.argv, sys.path)\nimport inside\n1 / 0\n"
)
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
RANKS = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    print("ranks", dist.get_world_size(), sys.argv)
dist.destroy_process_group()
sys.exit(3 if len(sys.argv) > 1 else 0)
"""

LIFE = """
import atexit, dataclasses, os, sys, tempfile, threading, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def say(text):
    os.write(1, f"{text}\\n".encode())

class Loud:
    def __init__(self, name):
        self.name = name
    def __del__(self, say=say):
        say(f"del {self.name}")

@dataclasses.dataclass
class Config:
    width: int
    loud: object

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.out = nn.Linear(4, config.width)
        self.config, self.loud = config, Loud("in the model")
    def forward(self, x):
        return self.out(x)

class Data(Dataset):
    def __init__(self):
        self.loud = Loud("in the dataset")
    def __len__(self):
        return 320
    def __getitem__(self, at):
        return torch.full((4,), 0.01 * at)

class Slow(threading.Thread):
    def run(self):
        threading.main_thread().join()
        say("the thread ends")

first, log = Loud("first"), open("lines.csv", "w")
folder = tempfile.TemporaryDirectory()
model = Net(Config(1, Loud("in the configuration")))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.register_step_post_hook(lambda *_, loud=Loud("in a hook"): None)
loader = DataLoader(Data(), batch_size=8)
for one in (model, folder, optimizer):
    weakref.finalize(one, say, f"finalized {type(one).__name__}")
atexit.register(say, "registered first")
thread = Slow()
thread.loud = Loud("in a thread")
thread.start()
# Modules take hold of what stands in torch's place, and keep it.
torch.kept_by_somebody = nn.Module.__init__, torch.Tensor.backward, torch.autograd.Variable._execution_engine

def train(how):
    loud = Loud("in the loop")
    for step, batch in enumerate(loader):
        if how.startswith("sick") and step == 20:
            batch = batch * float("nan")
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if how == "sick and raises" and step == 20:
            raise FloatingPointError("nan")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.write(f"{step}\\n")
        if how == "raises" and step == 30:
            raise ValueError("after 30 steps")
        if how == "exits" and step == 30:
            sys.exit(3)
        if how == "interrupted" and step == 30:
            raise KeyboardInterrupt

train(sys.argv[1])
atexit.register(say, "registered last")
say("the last line")
"""
