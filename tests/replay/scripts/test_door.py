"""A script as a target: run as `python FILE` would run it, up to its loop; what it does besides; what is said else."""

from __future__ import annotations

import atexit
import sys
import textwrap
import threading

import pytest
import torch

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.replay.target import load_target
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest

HEAD = """
import sys
import torch
from torch import nn
torch.manual_seed(1)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for i in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The working folder is an empty one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a file of the working folder; a body without a head gets the common one."""

    def written(body, name="train.py", head=HEAD):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(head + textwrap.dedent(body))
        return place

    return written


def steps_of(target="train.py", steps=3, **request):
    """The session's first steps: their losses, the session, and the replay's notes."""
    with open_replay(ReplayRequest(factory=target, **request)) as replay:
        session = replay.session()
        outcomes = [session.step(step) for step in range(steps) if session.has_step(step)]
        session.close()
        return outcomes, session, replay.notes


def bare_losses(steps=3):
    """The losses of HEAD and LOOP, as Python computes them."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).pow(2).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses


def test_a_loop_at_the_top_of_a_script(write):
    write(LOOP)
    outcomes, session, notes = steps_of()
    assert [outcome.loss for outcome in outcomes] == bare_losses()
    assert [outcome.optimizer_steps for outcome in outcomes] == [1, 1, 1]
    assert (session.precision.compute, list(session.optimizers), notes) == ("fp32", ["optimizer"], [])


def test_a_snapshot_puts_the_loops_variables_back(write):
    write(
        """
        count, seen, best = 0, [], None
        def train():
            global count
            total = 0.0
            while count < 20:
                optimizer.zero_grad()
                loss = model(torch.randn(8, 4)).pow(2).mean() + 0.1 * count + 0.01 * len(seen) + total
                loss.backward()
                optimizer.step()
                count += 1
                total += loss.item()
                seen.append(loss.item())
        if __name__ == "__main__":
            train()
        """
    )
    with open_replay(ReplayRequest(factory="train.py")) as replay:
        session = replay.session()
        session.has_step(0)
        start = session.snapshot()
        first = [session.step(step).loss for step in range(3) if session.has_step(step)]
        start.restore()
        assert [session.step(step).loss for step in range(3)] == first
        fresh = replay.session()
        assert [fresh.step(step).loss for step in range(3) if fresh.has_step(step)] == first
        assert len(set(first)) == 3


def test_it_runs_as_python_runs_it(write, tmp_path):
    write("def size():\n    return 4\n", "helper.py", head="")
    write("def more():\n    import late\n    return late.VALUE\n", "lib/thing.py", head="")
    write("", "lib/__init__.py", head="")
    write("VALUE = 3\n", "late.py", head="")
    write(
        """
        import dataclasses, json, pickle
        from helper import size
        from lib.thing import more
        @dataclasses.dataclass
        class Config:
            n: int = 0
        with open("said.txt", "a") as file:
            file.write(json.dumps([__name__, __file__, sys.argv, sys.path[0], size(), __package__]) + "\\n")
        assert pickle.loads(pickle.dumps(Config(2))) == Config(2)
        for i in range(20):
            assert sys.modules["__main__"].Config is Config and pickle.loads(pickle.dumps(Config(i))).n == i
            loss = model(torch.randn(8, 4)).pow(2).mean() * more()
            loss.backward()
            optimizer.step()
        """
    )
    main, modules = sys.modules["__main__"], set(sys.modules)
    steps_of(script_arguments=("--a", "b c"))
    folder = tmp_path.as_posix()
    said = set((tmp_path / "said.txt").read_text().splitlines())
    assert said == {f'["__main__", "{folder}/train.py", ["{folder}/train.py", "--a", "b c"], "{folder}", 4, null]'}
    assert sys.modules["__main__"] is main
    assert not {"helper", "lib", "late"} & (set(sys.modules) - modules)


def test_a_module_of_a_package_is_run_as_by_python_m(write):
    write("", "pkg/__init__.py", head="")
    write("def f(x):\n    return x\n", "pkg/parts.py", head="")
    write("from .parts import f\nassert (__name__, __package__) == ('__main__', 'pkg')\n" + LOOP, "pkg/train.py")
    outcomes, _, _ = steps_of("pkg.train")
    assert [outcome.loss for outcome in outcomes] == bare_losses()


def test_a_loop_in_a_file_beside_the_script(write):
    write(
        """
        class Engine:
            def __init__(self, model):
                self.net, self.__scale = model, 2.0
                self.opt = __import__("torch").optim.SGD(model.parameters(), lr=0.1)
            def evaluate(self):
                return self._run(range(30), train=False)
            def fit(self):
                for epoch in range(3):
                    self.evaluate()
                    self._run(range(30), train=True)
            def _run(self, xs, train):
                import torch
                with torch.set_grad_enabled(train), open("log.txt", "a") as log:
                    for x in xs:
                        loss = self.net(torch.full((8, 4), float(x))).pow(2).mean() / self.__scale
                        log.write(f"{x} ")
                        if train:
                            loss.backward()
                            if (x + 1) % 3 == 0:
                                self.opt.step()
                                self.opt.zero_grad()
        """,
        "engine.py",
        head="",
    )
    write("from engine import Engine\nEngine(model).fit()\n")
    outcomes, session, _ = steps_of(steps=4)
    assert [outcome.optimizer_steps for outcome in outcomes] == [1, 1, 1, 1]
    assert session.batches_of(1) == [[3, 4, 5]]


def test_several_models_and_optimizers_have_their_names(write):
    write(
        """
        parts = {"policy": nn.Linear(4, 4), "value": nn.Linear(4, 1)}
        frozen = nn.Linear(4, 4)
        optims = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts.values()]
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        unused = torch.optim.SGD(frozen.parameters(), lr=1.0)
        for i in range(20):
            with torch.autocast("cuda", dtype=torch.float16):
                x = parts["policy"](frozen(torch.randn(8, 4)))
                first, second = x.float().pow(2).mean(), parts["value"](x).float().mean()
            scaler.scale(first + second).backward()
            for optim in optims:
                scaler.step(optim)
                optim.zero_grad()
            scaler.update()
        """
    )
    outcomes, session, _ = steps_of()
    assert [name for name, _ in session.model.named_children()] == ["policy", "value"]
    assert list(session.optimizers) == ["optims0", "optims1"]
    assert (session.precision.compute, session.scaler.get_scale()) == ("fp16", 8.0)
    assert [outcome.optimizer_steps for outcome in outcomes] == [2, 2, 2]
    assert all(abs(outcome.loss) < 50 for outcome in outcomes), "the losses are those before the scale"


@pytest.mark.parametrize(
    ("loops", "items"),
    [
        ("for epoch in range(9):\n    for part in range(3):\n        update()\n", list(range(9))),
        ("for epoch in range(2):\n    for part in range(3):\n        update()\n", [0, 1, 2] * 3),
        ("for epoch in ampdoctor.steps(range(5)):\n    for part in range(30):\n        update()\n", list(range(5))),
    ],
    ids=["minibatches", "a short training", "marked"],
)
def test_which_loop_it_is(write, loops, items):
    update = "def update():\n    model(torch.ones(1, 4)).pow(2).mean().backward()\n    optimizer.step()\n"
    write(f"import ampdoctor\n{update}{loops}")
    with open_replay(ReplayRequest(factory="train.py")) as replay:
        session = replay.session()
        found = [session.batches_of(step)[0][-1] for step in range(len(items)) if session.has_step(step)]
        assert found == items
        assert ("begins anew" in str(replay.notes)) == (len(set(items)) < len(items))


def test_a_region_of_autocast_around_the_loop_shows_its_old_casts(write):
    write(
        """
        model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for i in range(20):
                optimizer.zero_grad()
                loss = (model(torch.randn(16, 4)).float() - 1).pow(2).mean()
                loss.backward()
                optimizer.step()
        """
    )
    assert "AMP210" in [finding.code for finding in bisect_nan(ReplayRequest(factory="train.py")).findings]


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_stays_as_it_is(write, tmp_path):
    write("with open('config.json', 'w') as file:\n    file.write('{}')\n" + LOOP)
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(FactoryError, match=r"opens config.json for writing at train.py:\d+ before its training loop"):
        steps_of()
    assert (tmp_path / "config.json").read_text() == "mine"


def test_new_files_are_made_and_told_of(write, tmp_path):
    config = "with open('out/config.json', 'w') as file:\n    file.write('{}')\n"
    write(f"import os\nos.makedirs('out', exist_ok=True)\n{config}{LOOP}")
    _, _, notes = steps_of()
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert notes == [
        (
            "train.py opens out/config.json for writing at train.py:10 before its training loop, and so does "
            "each replay of it"
        )
    ]


def test_replayed_steps_save_no_checkpoint(write, tmp_path):
    write(
        """
        import numpy
        from safetensors.torch import save_file
        from torch import save
        """
        + textwrap.indent(LOOP, " " * 8)
        + """
            save(model.state_dict(), "last.pt")
            save_file(model.state_dict(), "last.safetensors")
            numpy.save("loss.npy", loss.item())
        """
    )
    (tmp_path / "last.pt").write_text("mine")
    _, _, notes = steps_of()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "train.py"]
    assert (tmp_path / "last.pt").read_text() == "mine"
    assert notes == ["train.py:19 saves a checkpoint; replayed steps do not"]


def test_replayed_steps_change_no_file_that_is_there(write, tmp_path):
    write(
        "import json, os, pickle, shutil\nfrom pathlib import Path\nfrom shutil import rmtree\n"
        "Path('mine.txt').write_text('x')\n"
        + LOOP
        + """
    with open("log.json", "w") as file: json.dump(i, file)
    with open(file="log.pkl", mode="wb") as file: pickle.dump(i, file)
    Path("log.txt").write_text(str(i))
    shutil.rmtree("old")
    rmtree("old")
    Path("gone.txt").unlink()
    Path("new.txt").write_text(str(i))
    os.replace("new.txt", "last.txt")
    Path("mine.txt").write_text(str(i))
    Path("fresh.txt").write_text(str(i))
    assert Path("log.json").read_text() == "mine"
"""
    )
    before = ("log.json", "log.pkl", "log.txt", "old/last.pt", "gone.txt", "last.txt")
    (tmp_path / "old").mkdir()
    for name in before:
        (tmp_path / name).write_text("mine")
    _, _, notes = steps_of()
    assert {name: (tmp_path / name).read_text() for name in before} == dict.fromkeys(before, "mine")
    assert [(tmp_path / name).read_text() for name in ("mine.txt", "fresh.txt")] == ["2", "2"]
    stays = "what is there stays as it is, replayed steps do not write, move or remove it"
    assert f"{stays}: the first is log.json at train.py:19" in notes
    assert [note.partition(",")[0] for note in notes if note.startswith("the run's own code")] == [
        "the run's own code opens new.txt for writing at train.py:25"
    ]


@pytest.mark.parametrize(("around", "end"), [("for epoch in range(2):", "continue"), ("if True:", "sys.exit(1)")])
def test_a_script_that_comes_to_no_step_for_a_loss_that_is_not_finite(write, around, end):
    loop = LOOP.replace("torch.randn(8, 4)", "3e38 * torch.ones(8, 4)")
    loop = loop.replace("    loss.backward()", f"    if not loss.isfinite(): {end}\n    loss.backward()")
    evaluated = "for i in range(9):\n    with torch.no_grad(): model(torch.ones(8, 4))\n"
    write(evaluated + around + textwrap.indent(loop, "    "))
    findings = bisect_nan(ReplayRequest(factory="train.py")).findings
    assert {finding.where.step for finding in findings if finding.severity == "error"} == {0}


def test_a_script_that_ends_itself_at_a_loss_that_is_not_finite(write):
    write(LOOP.replace("torch.randn(8, 4)", "3e38 * torch.ones(8, 4)") + "    assert loss.isfinite()")
    findings = bisect_nan(ReplayRequest(factory="train.py")).findings
    assert {finding.where.step for finding in findings if finding.severity == "error"} == {0}


def test_what_a_script_registers_for_the_end_of_the_process_is_not_done(write, monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", lambda function, *_, **__: registered.append(function) or function)
    write("import atexit; assert atexit.register(print) is print" + LOOP)
    steps_of()
    assert not registered


def test_a_loop_in_a_thread_ends_without_a_traceback(write, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    body = "import threading\ndef train():\n" + textwrap.indent(LOOP, "    ")
    write(body + "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n")
    assert len(steps_of()[0]) == 3
    assert not said


@pytest.mark.parametrize(
    "around",
    [
        "try:\n    train()\nfinally:\n    os.system('echo lost > last.txt')\n",
        "with Saved():\n    train()\n",
        "while True:\n    try:\n        train()\n        break\n    except:\n        continue\n",
    ],
    ids=["finally", "with", "again and again"],
)
def test_what_a_script_makes_of_being_left_is_not_done(write, tmp_path, around):
    saved = (
        "class Saved:\n    def __enter__(self): pass\n    def __exit__(self, *_): os.system('echo lost > last.txt')\n"
    )
    head = "import os\n" + saved + "def train():\n" + textwrap.indent(LOOP, "    ")
    write(head + around)
    (tmp_path / "last.txt").write_text("mine")
    assert len(steps_of()[0]) == 3
    assert (tmp_path / "last.txt").read_text() == "mine"


# -- what is no training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print(1)\n", "train.py ended without a training step"),
        ("sys.exit('no data')\n", r"the script train.py ended with sys.exit\(no data\) before a training step"),
        ("def f(:\n", "train.py, line 8 is not valid Python"),
        ("import no_such_module\n", r"No module named 'no_such_module' \(is it installed where ampdoctor runs\?\)"),
        (
            "for i in range(9):\n    with torch.no_grad(): model(torch.ones(3, 4))\n    model.no_such()\n",
            "the script train.py raised AttributeError",
        ),
        ("model(torch.ones(3, 5))\n", "the script train.py raised RuntimeError: mat1 and mat2"),
        (
            "def f():\n    for i in range(9):\n        yield i\n        optimizer.step()\nlist(f())\n",
            r"train.py:9 has a yield or an await in it",
        ),
        (
            (
                "w = torch.zeros(3, requires_grad=True)\no = torch.optim.SGD([w], lr=0.1)\n"
                "for i in range(20):\n    w.sum().backward()\n    o.step()\n"
            ),
            r"the loop at train.py:10 steps SGD, but sees no torch.nn.Module with their parameters",
        ),
    ],
)
def test_one_sentence_says_why_there_is_nothing_to_replay(write, body, said):
    write(body)
    with pytest.raises(FactoryError, match=said) as caught:
        steps_of()
    text = getattr(caught.value, "traceback_text", "")
    assert "/ampdoctor/replay/" not in text


def test_an_error_in_a_step_shows_the_users_lines(write):
    write("def helper(model):\n    raise ValueError('late')\n", "helping.py", head="")
    write(
        "from helping import helper\nif __name__ == '__main__':\n    for i in range(20):\n        if i == 2:\n"
        "            helper(model)\n        model(torch.ones(1, 4)).mean().backward()\n        optimizer.step()\n"
    )
    with pytest.raises(UserCodeError) as caught:
        bisect_nan(ReplayRequest(factory="train.py"))
    text = caught.value.traceback_text
    assert text.count("Traceback") == 1
    assert 'train.py", line 12, in <module>' in text
    assert "/ampdoctor/" not in text


def test_a_file_with_a_sure_factory_is_not_run(write):
    write("def make_run() -> 'TrainingRun':\n    return None\nraise SystemExit\n")
    with pytest.raises(FactoryError, match=r"names no function: .*has make_run"):
        load_target("train.py")


def test_options_of_a_factory_are_refused(write):
    write(LOOP)
    with pytest.raises(FactoryError, match=r"train.py is a script and no factory: leave out --arg and --loss"):
        load_target("train.py").make({"a": 1}, loss="train:loss")


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")
def test_a_file_of_a_package_is_told_how_it_is_named(write):
    write("", name="pkg/__init__.py", head="")
    write("", name="pkg/engine.py", head="")
    write("from .engine import train", name="pkg/train.py", head="")
    with pytest.raises(UserCodeError) as raised:
        steps_of("pkg/train.py")
    assert "as in `package.train`" in raised.value.explained


def test_a_script_that_trains_on_the_cpu_is_not_moved_to_a_gpu(write):
    write(LOOP)
    with open_replay(ReplayRequest(factory="train.py")) as replay:
        replay.device = torch.device("cuda")  # as `--device auto` chooses on a machine that has one
        with pytest.raises(FactoryError, match=r"train\.py trains on the CPU, .* give --device cpu"):
            replay.session()


APPLIED = """
import ampdoctor
ampdoctor.apply(model, {{"kind": "dtype", "value": "{dtype}"}})
def step(model, optimizer):
    optimizer.zero_grad()
    with torch.autocast("{device}", dtype=torch.float16):
        out = model(torch.randn(8, 4))
    assert out.dtype is torch.{dtype}
    out.float().pow(2).mean().backward()
    optimizer.step()
"""
A_LOOP = """
for i in range(20):
    step(model, optimizer)
"""
A_FACTORY = """
def make():
    return ampdoctor.TrainingRun(model=model, batches=range(9), optimizer=optimizer, step=step)
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("dtype", "computed"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_a_dtype_that_a_script_applies_is_the_replays_too(write, dtype, computed, device):
    write(APPLIED.format(dtype=dtype, device=device) + A_LOOP)
    outcomes, session, _ = steps_of()
    assert (len(outcomes), session.precision.compute) == (3, computed)
    with torch.autocast("cpu", dtype=torch.float16):  # the change has ended with the replay
        assert torch.nn.Linear(4, 2)(torch.ones(1, 4)).dtype is torch.float16


def test_a_dtype_that_a_factory_applies_is_the_replays_too(write):
    write(APPLIED.format(dtype="bfloat16", device="cuda") + A_FACTORY)
    assert len(steps_of("train.py:make")[0]) == 3
