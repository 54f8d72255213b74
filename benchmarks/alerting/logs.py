"""Trains, and keeps what was trained: a compressed log and a record of what was wrong in it, for each training.

A training is kept under a key of what it is made of: the loop, the models, the task, the fault's own code and all
numbers that were drawn for it. Who changes one fault trains its trainings again and no others. The watcher's own code
is no part of the key: after a change of what it measures, begin with an empty folder.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from ampdoctor.evidence.log_records import Line
from ampdoctor.evidence.log_text import line_of
from ampdoctor.evidence.paths import logs_in
from benchmarks.alerting import healthy, loop, nets, tasks
from benchmarks.alerting.harm import STAYS, harm_step, is_above, is_sudden
from benchmarks.alerting.loop import Batch, Fault, Run, clean_loss, ended_in_nan, take_step, train
from benchmarks.alerting.mechanisms import MECHANISMS, Mechanism

ATTEMPTS = 3
"""Draws of a fault, until one does harm."""
AFTERWARDS = 60
"""Steps that the two logs have from the harm on: no alert after it counts."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a training beside its log.

    Attributes:
        name: Mechanism and number, or the healthy training's name.
        kind: "sick", "twin" (of the sick one that has the same name), "healthy".
        seed: That was given.
        task: What was learned.
        steps: That the log has.
        every: Steps from one look at single tensors to the next.
        drawn: Numbers of the fault.
        attempt: Draws before this one, none of which did harm.
        onset: First step at which something is wrong; null in a healthy one.
        harm: The step whose update does the harm.
        sudden: Whether harm came at once.
        cause: First causes that are right.
        layers: Pattern of names that are right; "" where none is.
    """

    name: str
    kind: str
    seed: int
    task: str
    steps: int
    every: int
    drawn: dict[str, float | str | None] | None = None
    attempt: int = 0
    onset: int | None = None
    harm: int | None = None
    sudden: bool = False
    cause: tuple[str, ...] = ()
    layers: str = ""


def names() -> list[tuple[str, str]]:
    """Every training's kind and name, twins left out: the sick ones in turn over the mechanisms, then the healthy."""
    most = max(len(mechanism.tasks) for mechanism in MECHANISMS.values())
    sick = [f"{name}/{i}" for i in range(most) for name, m in MECHANISMS.items() if i < len(m.tasks)]
    return [*(("sick", name) for name in sick), *(("healthy", name) for name in (*healthy.RUNS, *healthy.LOOPS))]


def collect(kind: str, name: str, seed: int, cache: Path) -> list[Record]:
    """Trains what the cache lacks; returns the records of a training and, of a sick one, its twin.

    Nothing is returned for a fault that did no harm in any attempt.
    """
    if kind == "healthy":
        return [_healthy(name, seed, cache)]
    return next((found for attempt in range(ATTEMPTS) if (found := _pair(name, seed, attempt, cache))), [])


def kept(seed: int, cache: Path) -> list[Record]:
    """The records of all trainings whose log is kept, whatever code they come of; in the order of `names`."""
    found = []
    for kind, name in names():
        stems = [f"{_stem(kind, name, seed)}.{attempt}" for attempt in range(ATTEMPTS)]
        for stem in stems if kind == "sick" else [_stem(kind, name, seed)]:
            records = _kept(cache, stem)
            if records and (kind == "healthy" or records[0].harm is not None):
                found += records
                break
    return found


def lines(record: Record, cache: Path) -> Iterator[Line]:
    """The lines of a kept log, in the order of their arrival."""
    with gzip.open(cache / f"{_stem(record.kind, record.name, record.seed)}.jsonl.gz", "rb") as file:
        for text in file:
            whole = line_of(text)
            if whole is not None:
                yield whole.line


def _pair(name: str, seed: int, attempt: int, cache: Path) -> list[Record]:
    """A sick training and its twin; empty where the fault did no harm."""
    kind, number = name.rsplit("/", 1)
    mechanism = MECHANISMS[kind]
    task = mechanism.tasks[int(number)]
    draw, steps, every = _drawn(name, seed, attempt)
    fault = mechanism.make(draw, steps)
    drawn = {key: value for key, value in vars(fault).items() if key != "onset"}
    if mechanism.halves:
        drawn["halves"] = mechanism.halves
    key = _key(task, type(fault), mechanism.own, mechanism.rate, steps, every, fault.onset, drawn)
    known = _kept(cache, f"{_stem('sick', name, seed)}.{attempt}", key)
    if known is None:
        made = Random(f"{seed}/{name}/{attempt}/task").getrandbits(64)
        trial = _trial(_run(task, mechanism, made, steps), _run(task, mechanism, made, steps), fault)
        harm = harm_step(trial.sick, trial.twin, trial.applied, fault.onset)
        until = steps if harm is None else min(harm + AFTERWARDS, steps)
        records = [
            Record(
                name=name, kind="sick", seed=seed, task=task, every=every, attempt=attempt, drawn=drawn,
                steps=until, onset=fault.onset, harm=harm,
                sudden=harm is not None and is_sudden(fault.onset, harm), cause=mechanism.cause,
                layers=mechanism.layers,
            ),
            Record(name=name, kind="twin", seed=seed, task=task, every=every, attempt=attempt, steps=until),
        ]  # fmt: skip
        if harm is not None:
            again = mechanism.make(_drawn(name, seed, attempt)[0], steps)
            for record, what, losses in ((records[0], again, trial.losses), (records[1], Fault(), trial.twin_losses)):
                run = _run(task, mechanism, made, steps)
                run.steps = record.steps
                _watched(run, what, losses, every, cache / f"{_stem(record.kind, name, seed)}.jsonl.gz")
        numbers = {"sick": _short(trial.sick), "twin": _short(trial.twin)}
        known = _keep(cache, f"{_stem('sick', name, seed)}.{attempt}", key, records, numbers)
    return known if known[0].harm is not None else []


def _drawn(name: str, seed: int, attempt: int) -> tuple[Random, int, int]:
    """What the fault is drawn from, and the training's steps and the steps between looks."""
    draw = Random(f"{seed}/{name}/{attempt}")
    return draw, draw.randrange(550, 750), draw.choice([20, 25, 50])


@dataclass(frozen=True)
class _Trial:
    """A sick training and its twin, side by side and without the watch, up to the harm.

    Attributes:
        sick: Losses on clean data before the first step and after each; NaN where nothing is wrong yet.
        twin: The same of the twin.
        applied: Whether each update of the sick one was applied.
        losses: Of each step's own data.
        twin_losses: The same of the twin.
    """

    sick: list[float]
    twin: list[float]
    applied: list[bool]
    losses: list[float]
    twin_losses: list[float]


def _trial(sick: Run, twin: Run, fault: Fault) -> _Trial:
    trial = _Trial([clean_loss(sick)], [clean_loss(twin)], [], [], [])
    fault.begin(sick)
    above = 0
    while len(trial.losses) < sick.steps and above < STAYS and not ended_in_nan(trial.losses):
        step = len(trial.losses)
        loss, applied = take_step(sick, fault, step)
        trial.losses.append(loss)
        trial.applied.append(applied)
        trial.twin_losses.append(take_step(twin, Fault(), step)[0])
        wrong = step >= fault.onset
        if not wrong and trial.twin_losses[-1] != loss:
            raise AssertionError("the twins differ before anything is wrong")
        trial.sick.append(clean_loss(sick) if wrong else math.nan)
        trial.twin.append(clean_loss(twin) if wrong else math.nan)
        above = above + 1 if wrong and is_above(trial.sick[-1], trial.twin[-1], trial.twin[0]) else 0
    return trial


def _watched(run: Run, fault: Fault, trial: list[float], every: int, path: Path) -> None:
    """Trains once more, under the watch, which must change nothing."""
    with tempfile.TemporaryDirectory() as folder:
        losses = train(run, fault, Path(folder), every=every)
        if not all(a == b or math.isnan(a) for a, b in zip(losses, trial, strict=False)):
            raise AssertionError(f"{path.stem}: another training under the watch")
        _keep_log(Path(folder), path)


def _healthy(name: str, seed: int, cache: Path) -> Record:
    draw = Random(f"{seed}/{name}")
    every = draw.choice([20, 25, 50, 100])
    function, steps = {**healthy.RUNS, **healthy.LOOPS}[name]
    key = _key(name, _healthy_code(function), steps, every)
    known = _kept(cache, _stem("healthy", name, seed), key)
    if known is None:
        with tempfile.TemporaryDirectory() as folder:
            before, after = healthy.train_healthy(name, draw, Path(folder, "log"), every)
            if not after < before:
                raise AssertionError(f"{name}: it was to end better than it began: {before:.4g}, then {after:.4g}")
            _keep_log(Path(folder, "log"), cache / f"{_stem('healthy', name, seed)}.jsonl.gz")
        record = Record(name=name, kind="healthy", seed=seed, task=name, steps=steps, every=every)
        known = _keep(cache, _stem("healthy", name, seed), key, [record], {"clean": [before, after]})
    return known[0]


def _healthy_code(function: Callable[..., object]) -> str:
    """The source of what makes it; of the plain ones, the tasks' own is part of every key."""
    return "" if function.__name__ == "<lambda>" else _code(inspect.getsource(function))


def _run(task: str, mechanism: Mechanism, made: int, steps: int) -> Run:
    name, _, how = task.partition(":")
    settings = {"precision": how} if how in tasks.LINEAR else {"kind": how} if how else {}
    run = tasks.TASKS[name](Random(made), steps, own=mechanism.own, **settings)
    run.rates = [mechanism.rate * rate for rate in run.rates]
    if mechanism.halves:
        _fade(run, mechanism.halves)
    return run


def _fade(run: Run, halves: int) -> None:
    """Lets the loss become smaller and smaller; on clean data it stays what it is."""
    batch, loss, now = run.batch, run.loss, [0]

    def drawn(step: int) -> Batch:
        now[0] = step
        return batch(step)

    run.batch = drawn
    run.loss = lambda b: loss(b) * (0.5 ** (now[0] / halves) if run.model.training else 1.0)


def _stem(kind: str, name: str, seed: int) -> str:
    words = "".join(c if c.isalnum() else "-" for c in name)
    return f"seed{seed}-{kind}-{words}"


def _key(*parts: object) -> str:
    """Of what a training is made of; neither comments nor docstrings nor the way a line is broken are part of it."""
    sources = [_code(inspect.getsource(module)) for module in (loop, nets, tasks)]
    said = [_code(inspect.getsource(part)) if isinstance(part, type) else repr(part) for part in parts]
    return hashlib.sha256("\0".join([*sources, *said]).encode()).hexdigest()[:16]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _kept(cache: Path, stem: str, key: str | None = None) -> list[Record] | None:
    try:
        held = json.loads((cache / f"{stem}.json").read_text())
    except FileNotFoundError:
        return None
    if key is not None and held["key"] != key:
        return None
    return [Record(**{**record, "cause": tuple(record["cause"])}) for record in held["records"]]


def _keep(cache: Path, stem: str, key: str, records: list[Record], clean: dict[str, list[float]]) -> list[Record]:
    """Written last, and as a whole: a record stands for a log that is there."""
    beside = cache / f"{stem}.tmp"
    beside.write_text(json.dumps({"key": key, "records": [asdict(record) for record in records], "clean": clean}))
    beside.replace(cache / f"{stem}.json")
    return records


def _keep_log(folder: Path, path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=6) as out:
        for file in logs_in(path.name for path in folder.iterdir())[0]:
            with (folder / file).open("rb") as source:
                shutil.copyfileobj(source, out)


def _short(losses: list[float]) -> list[float]:
    return [loss if not math.isfinite(loss) else float(f"{loss:.5g}") for loss in losses]
