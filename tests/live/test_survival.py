"""A watched training is left as it was, whatever happens to it, to us or to the disk."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.errors import StoppedError
from ampdoctor.workflows import watcher
from ampdoctor.workflows.requests import WatchRequest
from ampdoctor.workflows.watch import watching

ROOT = Path(__file__).parents[2]


def in_place():
    """What somebody could leave behind in torch."""
    owners = (torch.amp.GradScaler, torch.optim.Optimizer, nn.Module, nn.utils.clip_grad, nn.utils)
    places = {
        (owner.__name__, name): value for owner in owners for name, value in vars(owner).items() if callable(value)
    }
    places["engine"] = Variable._execution_engine
    hooks = [value for name, value in vars(modules).items() if name.startswith("_global") and isinstance(value, dict)]
    hooks += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    return places, [dict(one) for one in hooks], torch._C._len_torch_function_stack(), list(sys.meta_path)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = in_place()
    yield
    assert in_place() == before


@pytest.fixture
def watched(tmp_path):
    """Returns a context in which what trains is watched; gives what was told, said and written."""

    @contextmanager
    def context(**options):
        seen = SimpleNamespace(told=[], said=[], health=tmp_path / "health", log=[])
        request = WatchRequest(**{"health": str(seen.health), "script": "train.py", **options})
        error = None
        with watching(request, tell=seen.told.append, say=seen.said.append) as watch:
            seen.doctor = watch.doctor
            try:
                yield seen
            except BaseException as raised:
                error = raised
                raise
            finally:
                watch.ended(error)
                seen.doctor._log.close()
                file = seen.health / "log.jsonl"
                seen.log = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return context


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


def train(model=None, optimizer=None, *, steps=5, bad=None, call=None):
    """Train; the batch of the step `bad` is NaN."""
    model = network() if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(steps):
        x = torch.randn(4, 8) * (float("nan") if step == bad else 1)
        loss = (model(x) if call is None else call(model, x)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def in_a_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def kinds(seen, kind):
    return [line for line in seen.log if line["kind"] == kind]


def steps_of(seen):
    return [line["step"] for line in kinds(seen, "step")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_nothing_is_left_after_what_ends_the_loop(watched, error):
    with pytest.raises(error), watched() as seen:  # noqa: PT012 - what ends it comes after a training
        train(steps=3)
        raise error
    assert steps_of(seen) == [0, 1, 2]
    (end,) = kinds(seen, "end")
    assert (end.get("exit_code", 0), end["reason"]) == (
        {KeyboardInterrupt: 130, ValueError: 1}.get(error, 0),
        error.__name__,
    )


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Mode, lambda: torch.device("cpu")], ids=["function", "device"])
def test_modes_of_the_loops_own(watched, mode):
    def call(model, x):
        with mode():
            out = model(x)
            return out * 1
        raise AssertionError

    with watched() as seen:
        train(bad=2, call=call)
        assert torch._C._len_torch_function_stack() == 0
    assert [report.findings[0].code for report in seen.told] == ["AMP204"]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_transforms_and_tracing_are_no_part_of_a_step(watched):
    def call(model, x):
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def of_one(held, row):
            return torch.func.functional_call(model.eval(), held, (row[None],)).sum()

        torch.func.vmap(torch.func.grad(of_one), (None, 0))(weights, x)
        return model.train()(x) + torch.func.vmap(torch.sum)(x).mean()

    with watched() as seen:
        torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8))
        train(bad=3, call=call)
    assert len(steps_of(seen)) == 5
    assert [report.findings[0].code for report in seen.told] == ["AMP204"]
    assert seen.said == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_model_that_cannot_be_recorded_is_trained_and_that_is_said(watched):
    with watched() as seen:
        train(torch.jit.script(network()), bad=3)
    assert steps_of(seen) == [0, 1, 2, 3, 4]
    assert "recorded no more" in seen.said[0]
    assert [(report.verdict, report.findings) for report in seen.told] == [("inconclusive", ())]


def test_a_forward_that_raises_or_is_interrupted_is_forgotten(watched, recwarn):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.error = network(), None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return self.inner(x)

    with watched() as seen:
        model = Model()
        for error in (ValueError, KeyboardInterrupt, None):
            model.error = error
            with contextlib.suppress(ValueError, KeyboardInterrupt):
                model(torch.randn(4, 8))
        train(model, steps=2)
        model.error = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 8))
        model.error = None
        train(model, bad=3)
    assert len(recwarn) == 0
    assert [report.findings[0].code for report in seen.told] == ["AMP204"]


def test_an_evaluation_under_autograd_lets_its_batches_go(watched):
    with watched() as seen:
        model = train()
        tape, most = seen.doctor._watch.recorder._tape, 0
        for _ in range(300):
            model(torch.randn(4, 8))
            most = max(most, len(tape.given))
        assert most < 80
        kept = [model(torch.randn(4, 8)).mean() for _ in range(300)]
        assert len(tape.given) >= 300  # what they were made of
        train(model, bad=1)
    assert len(kept) == 300
    assert [report.findings[0].code for report in seen.told] == ["AMP204"]


def test_what_an_accumulation_holds_is_bounded_and_that_is_said(watched, monkeypatch):
    from ampdoctor.live.recording import journal

    monkeypatch.setattr(journal, "_MOST_BYTES", 64 * 1024)
    with watched() as seen:
        seen.doctor._watch.recorder._journal._light = 64 * 1024
        model = nn.Linear(256, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for at in range(100):
            (model(torch.randn(4, 256) * (float("nan") if at == 99 else 1)).mean() / 100).backward()
            assert seen.doctor._watch.recorder._tape.held_bytes < 80 * 1024
        optimizer.step()
    (report,) = seen.told
    assert report.findings[0].code == "AMP204"
    assert "let go of, to spare memory" in report.skipped[0].reason


def state(model, optimizer, scaler):
    return {
        "model": model.state_dict(),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "unscaled": {key: dict(value) for key, value in scaler._per_optimizer_states.items()}
        if scaler.is_enabled()
        else {},
        "random": (torch.get_rng_state(), random.getstate()),
        "modes": [part.training for part in model.modules()],
        "hooks": [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()],
        "torch": (torch._C._len_torch_function_stack(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }


def equal(here, there):
    if isinstance(here, torch.Tensor):
        return torch.allclose(here, there, rtol=0, atol=0, equal_nan=True)
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(equal(here[key], there[key]) for key in here)
    if isinstance(here, list | tuple):
        return len(here) == len(there) and all(map(equal, here, there))
    return here == there


class _After(TorchDispatchMode):
    """Raises at some op of the look."""

    def __init__(self, ops, error):
        super().__init__()
        self.left, self.error = ops, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0 or (self.left < 0 and self.error is not KeyboardInterrupt and "empty" in func.__name__):
            raise self.error("not enough memory: you tried to allocate 1 byte")
        return func(*args, **(kwargs or {}))


def a_scaled_loop(scaled, states, *, bad=3):
    """A loop under a scaler whose looks are surrounded by `states`, copies of all that it has."""
    model, scaler = network(), torch.amp.GradScaler("cpu", enabled=scaled)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(5):
        x = torch.randn(4, 8) * (float("nan") if step == bad else 1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        states["parts"] = model, optimizer, scaler
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("ops", "scaled", "error"),
    [(10**9, True, None), (7, True, KeyboardInterrupt), (200, False, KeyboardInterrupt), (60, True, RuntimeError)],
)
def test_a_look_leaves_all_as_it_was_however_it_ends(watched, monkeypatch, ops, scaled, error):
    states, real = {}, watcher.look

    def look(*args, **kwargs):
        states["before"] = copy.deepcopy(state(*states["parts"]))
        try:
            with _After(ops, error) as mode:
                return real(*args, **kwargs)
        finally:
            states["raised"] = mode.left <= 0
            after = state(*states["parts"])
            states["changed"] = [key for key, was in states["before"].items() if not equal(was, after[key])]

    monkeypatch.setattr(watcher, "look", look)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt), watched() as seen:
            a_scaled_loop(scaled, states)
        assert seen.told == []
        assert not list(seen.health.glob("*bundle*"))
    else:
        with watched() as seen:
            a_scaled_loop(scaled, states)
        (report,) = seen.told
        assert (report.verdict, report.run["kept"]["bundle"]) == ("sick", str(seen.health / "bundle-3"))
        assert (seen.health / "bundle-3" / "manifest.json").is_file()
        assert len(steps_of(seen)) == 5
        if report.errors:
            assert f"ampdoctor bisect-nan {seen.health / 'bundle-3'}" in seen.said[-1]
        assert error is not None or [finding.code for finding in report.findings] == ["AMP204"]
    assert states["raised"] == (error is not None)
    assert states["changed"] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_bundle_is_whole_or_absent(watched, monkeypatch, error):
    from ampdoctor.replay.bundles import write as writing

    real = writing.write_safetensors

    def write(path, tensors):
        real(path, tensors)
        raise error("no space left")

    monkeypatch.setattr(writing, "write_safetensors", write)
    try:
        with watched() as seen:
            train(bad=2)
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    else:
        assert [report.findings[0].code for report in seen.told] == ["AMP204"]
        assert "no bundle of step 2 was kept" in seen.said[0]
        assert len(steps_of(seen)) == 5
    assert not list(seen.health.glob("*bundle*"))


@pytest.mark.parametrize("on_sick", ["record", "stop"])
def test_who_cannot_be_told_anything_costs_neither_the_training_nor_the_watch(tmp_path, on_sick):
    def closed(_):
        raise ValueError("I/O operation on closed file.")

    request = WatchRequest(health=str(tmp_path), script="train.py", on_sick=on_sick)
    ends = pytest.raises(StoppedError) if on_sick == "stop" else contextlib.nullcontext()
    with watching(request, tell=closed, say=closed) as watch:
        with ends:
            train(bad=2)
        watch.ended(None)
        watch.doctor._log.close()
        log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "look"] == [2]
    taken = [line["step"] for line in log if line["kind"] == "step"]
    assert taken == ([0, 1] if on_sick == "stop" else [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("options", "bundle", "told"),
    [({"bundle_max": 1000}, False, 1), ({"bundle": False}, False, 1), ({"look": "off"}, False, 0)],
)
def test_less_may_be_asked_for(watched, options, bundle, told):
    with watched(**options) as seen:
        train(bad=2)
    assert (seen.health / "bundle-2").exists() == bundle
    assert len(seen.told) == told
    assert len(steps_of(seen)) == 5


def test_a_health_folder_that_cannot_be(watched, tmp_path):
    (tmp_path / "file").write_text("here")
    with watched(health=str(tmp_path / "file")) as seen:
        train(bad=2)
    assert len(seen.told) == 1
    assert sorted("the log" in said for said in seen.said) == [False, True]
    assert (tmp_path / "file").read_text() == "here"


class _Wrapper(torch.optim.Optimizer):
    """As those that add a schedule or a device: its own hooks are called around those of what it steps."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


class _Keeper(torch.optim.SGD):
    """It holds another optimizer over the same parameters, and steps by itself."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, lr=1e-2)
        self.inner = inner


@pytest.mark.parametrize("around", [lambda inner: _Wrapper(_Wrapper(inner)), _Keeper])
def test_the_steps_of_a_wrapped_optimizer_are_counted_once(watched, around):
    with watched() as seen:
        model = network()
        train(model, around(torch.optim.SGD(model.parameters(), 1e-2)), bad=3)
    missed = int(around is _Keeper)  # its first step shows what it is
    assert steps_of(seen) == list(range(5 - missed))
    assert [report.run["step"] for report in seen.told] == [3 - missed]


def test_threads_and_forked_children_take_no_part_in_the_step(watched):
    with watched() as seen:
        model = train(steps=2)
        in_a_thread(lambda: train(steps=2))
        child = os.fork()
        if child == 0:
            train(model, steps=30)
            os._exit(0 if len(seen.doctor._watch.recorder._tape.instructions) < 20 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(model, steps=2, bad=1)
    assert len(steps_of(seen)) == 6
    assert [report.findings[0].code for report in seen.told] == ["AMP204"]


def test_of_threads_that_train_at_once_the_numbers_are_taken_and_nothing_is_run_again(watched):
    """Step 3 of one is sick while the other is between its forward and its update.

    They share no weights: two backwards into the same ones crash torch 2.13 itself, watched or not.
    """

    def both():
        torch.manual_seed(0)
        models = [network() for _ in range(2)]
        at_once = threading.Barrier(2)

        def run(number):
            model = models[number]
            optimizer = torch.optim.SGD(model.parameters(), 1e-2)
            generator = torch.Generator().manual_seed(number)
            for step in range(6):
                x = torch.randn(4, 8, generator=generator) * (float("nan") if (step, number) == (3, 1) else 1)
                at_once.wait(10)
                loss = model[:3](x).pow(2).mean()
                at_once.wait(10)
                optimizer.zero_grad()
                loss.backward()
                at_once.wait(10)
                optimizer.step()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [p for model in models for p in model.parameters()]

    expected = both()
    with watched() as seen:
        found = both()
    assert all(torch.allclose(*pair, 0, 0, True) for pair in zip(expected, found, strict=True))
    assert steps_of(seen) == [step for step in range(6) for _ in range(2)]
    assert [said for said in seen.said if "several threads" in said] == seen.said[:1]
    assert [(report.verdict, report.findings) for report in seen.told] == [("sick", ())]
    assert not list(seen.health.glob("bundle*"))


def test_a_training_in_one_other_thread_is_looked_at(watched):
    """The thread that has only tried the model out is none that trains."""
    with watched() as seen:
        model = network()
        model(torch.randn(4, 8))
        in_a_thread(lambda: train(model, bad=3))
    assert [report.findings[0].code for report in seen.told] == ["AMP204"]
    assert not any("thread" in said for said in seen.said)


SCRIPT = """
import os, shutil, signal, sys, time
import torch
from torch import nn

how = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(40):
    if step == 20:
        time.sleep(0.5)  # what was handed over is on its way
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        if how == "fork" and os.fork() == 0:
            sys.exit(9)
        if how == "removed":
            shutil.rmtree(os.environ["HEALTH"])
        if how == "chdir":
            os.chdir("/")
    x = torch.randn(8, 16) * (float("nan") if step == 30 and how in ("removed", "chdir") else 1)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "lines", "ended"),
    [
        ("SIGTERM", -signal.SIGTERM, range(20), None),
        ("SIGINT", -signal.SIGINT, range(20), 130),
        ("fork", 0, range(40), 0),
        ("removed", 1, range(20, 40), 0),
        ("chdir", 1, range(40), 0),
    ],
)
def test_a_real_process_ends_as_it_would_and_its_log_is_whole(tmp_path, how, code, lines, ended):
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HEALTH": str(tmp_path / "h")}
    command = [sys.executable, "-m", "ampdoctor", "run", "--health", "h", "train.py", how]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("done\n" if code in (0, 1) else "")
    log = [json.loads(line) for line in (tmp_path / "h" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "step"] == list(lines)
    assert [line.get("exit_code", 0) for line in log if line["kind"] == "end"] == ([] if ended is None else [ended])
    assert (tmp_path / "h" / "bundle-30" / "manifest.json").is_file() == (how in ("removed", "chdir"))


def _beside_a_thread(model, bad):
    """Another thread trains a model of its own between this one's forward and backward."""
    optimizer, critic = torch.optim.SGD(model.parameters(), 0.05), nn.Linear(8, 1)
    other = torch.optim.SGD(critic.parameters(), 0.05)
    for step in range(5):
        y = model(torch.randn(4, 8))
        in_a_thread(lambda: (critic(torch.randn(4, 8)).sum().backward(), other.step()))
        y = torch.log(y * 0 - 1) if step == bad else y
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()


def _by_its_part(model, bad):
    """The loop calls a model, and a part of it, that lie in a dict."""
    nets = {"all": nn.Sequential(model, nn.Linear(1, 8))}
    del model
    optimizer = torch.optim.SGD(nets["all"].parameters(), 0.05)
    for step in range(5):
        x = torch.randn(4, 8)
        rebuilt, y = nets["all"](x), nets["all"][0](x)
        y = torch.log(y * 0 - 1) if step == bad else y
        optimizer.zero_grad()
        ((rebuilt - x).square().mean() + y.square().mean()).backward()
        optimizer.step()


def _by_a_variance(model, bad):
    """The loop asks for a number that a tensor has entered twice."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(5):
        y = model(torch.randn(4, 8))
        y = y + torch.log(y * 0 - 1) if step == bad else y
        apart = y.detach() - y.detach().mean()
        if torch.isnan((apart * apart).mean()):
            continue
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [_beside_a_thread, _by_its_part, _by_a_variance])
def test_a_sick_step_of_such_a_loop_is_run_again(watched, loop):
    torch.manual_seed(0)
    with watched() as seen:
        loop(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), bad=3)
    if loop is _by_a_variance:
        assert any("step 3: a batch was left out" in said for said in seen.said)
    else:
        (report,) = seen.told
        assert (report.findings[0].code, report.findings[0].where.op, report.skipped) == ("AMP202", "aten.log", ())
