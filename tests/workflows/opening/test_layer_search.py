"""`--strategy bisect`: it agrees with the trace, runs no layer past its probe, and leaves everything as it was."""

from __future__ import annotations

import copy
import math
import random
from contextlib import contextmanager

import pytest
import torch

from ampdoctor.diagnosis.replay.nonfinite import cause_of, culprits
from ampdoctor.errors import UsageError
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.reports.json_report import report_as_dict
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.close_look import LayerSearch, SearchLost
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from fixtures.corpus import runs
from tests.corpus.reports import SICK, kind_and_phase, policies, uses_transformers
from tests.corpus.reports import request_of as request_of_case
from tests.workflows.test_bisect_nan_shapes import FILE as SHAPES_FILE

FILE = "tests/workflows/opening/searched.py"

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def address(origin):
    where = origin.where
    return (
        where.step,
        where.micro_batch,
        where.module,
        where.call,
        where.op,
        where.phase,
        where.nonfinite,
        where.source,
        where.forward_source,
        cause_of(origin),
    )


@contextmanager
def harmed_step(request, steps=8):
    """The first step that leaves harm: (session, snapshot before it, outcome, the probe that saw it)."""
    with open_replay(request) as replay:
        session, nonfinite_probe = replay.session(), NonFiniteProbe(locate=False)
        try:
            for step in range(steps):
                if not session.has_step(step):
                    break
                snapshot = session.snapshot()
                with session.watched(nonfinite_probe):
                    outcome = session.step(step)
                if nonfinite_probe.report.affected:
                    yield session, snapshot, outcome, nonfinite_probe
                    return
            yield None
        finally:
            session.close()


def both(request):
    """(culprits by search or None, why not, culprits by trace) of the first harmed step; None for none."""
    with harmed_step(request) as harmed:
        if harmed is None:
            return None
        session, snapshot, outcome, _ = harmed
        reason = found = None
        try:
            found = culprits(LayerSearch(*harmed).trace())
        except SearchLost as lost:
            reason = str(lost)
        snapshot.restore()
        tracer = OpTraceProbe()
        with session.watched(tracer):
            session.step(outcome.step)
        return found, reason, culprits(tracer.trace)


ONE_OF_A_KIND = {
    (label["kind"], label["phase"]): case
    for case in reversed(SICK)
    if not uses_transformers(case) and (label := runs.label(case))["nonfinite"]
}.values()
"""Cases that are searched with every `make test`; `make thorough` searches them all."""


@pytest.mark.each_value_once(of=kind_and_phase)
@pytest.mark.parametrize(
    ("case", "policy"),
    [
        pytest.param(case, policy, marks=() if case in ONE_OF_A_KIND else pytest.mark.slow)
        for case in SICK
        for policy in policies(case)
    ],
)
def test_what_the_search_finds_in_a_labelled_run_the_trace_finds_too(case, policy, tmp_path):
    looked = both(request_of_case(case, policy, str(tmp_path)))
    if looked is None or looked[0] is None:
        return  # nothing non-finite, or the trace decides
    found, _, traced = looked
    assert address(found[0]) == address(traced[0])


BOTH = ("called_twice", "reentrant", "own_chunks")
"""Shapes with several calls or several backwards of one module; others are looked at in one or the other."""
FORWARD, BACKWARD = ("weight_norm", "accumulation", "shared_submodule"), ("nonreentrant", "tied", "custom_function")


@pytest.mark.parametrize(
    ("shape", "origin"),
    [*((shape, "forward") for shape in BOTH + FORWARD), *((shape, "backward") for shape in BOTH + BACKWARD)],
)
def test_both_strategies_agree_on_every_shape(shape, origin):
    request = ReplayRequest(factory=f"{SHAPES_FILE}:make_run", arguments={"shape": shape, "origin": origin})
    found, reason, traced = both(request)
    if (shape, origin) == ("own_chunks", "backward"):
        assert reason is not None, "the chunks of a loop of the user's own all harm the same gradients"
        return
    assert reason is None
    assert address(found[0]) == address(traced[0])
    assert len(found) == 1, "of several micro-batches that are sick alike the first is named"


# -- how much runs ---------------------------------------------------------------------------------------------------


def request_of(**arguments):
    return ReplayRequest(factory=f"{FILE}:make_run", arguments=arguments, strategy="bisect")


def calls_of(request, monkeypatch):
    """The search of the first harmed step, and what ran in each of its partial replays."""
    replays = []
    original = LayerSearch._partly

    def partly(search, probe):
        calls().clear()
        try:
            original(search, probe)
        finally:
            replays.append((type(probe).__name__, probe, list(calls())))

    monkeypatch.setattr(LayerSearch, "_partly", partly)
    with harmed_step(request) as harmed:
        search = LayerSearch(*harmed)
        trace = search.trace()
    return search, trace, replays


def calls():
    """The factory's own copy of the list: its file is loaded anew for each replay."""
    import sys

    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    found = [module.CALLS for module in modules if str(module.__file__).endswith("opening/searched.py")]
    return found[-1]


@pytest.mark.parametrize(
    ("origin", "layers"),
    [("forward", 3), ("backward", 7), ("forward", 16), ("backward", 33)],
)
def test_no_layer_past_the_probe_runs(layers, origin, monkeypatch):
    at = random.Random(layers).randrange(layers)
    search, trace, replays = calls_of(request_of(layers=layers, at=at, origin=origin), monkeypatch)
    (culprit,) = culprits(trace)
    assert culprit.where.module == str(at)
    assert culprit.where.phase == origin
    assert search.partial_replays == len(replays) <= math.ceil(math.log2(layers + 1)) + 2
    names = [name for name, _, _ in replays]
    assert names == ["OrderProbe", *["PointProbe"] * (len(names) - 2), "IntervalTrace"]
    for _, probe, ran in replays[1:-1]:
        layer = int(probe._point.name)
        forward = [index for kind, index in ran if kind == "forward"]
        backward = [index for kind, index in ran if kind == "backward"]
        if origin == "forward":
            assert forward == list(range(layer + 1))
            assert backward == []
        else:
            assert forward == list(range(layers))
            assert backward == list(range(layers - 1, layer, -1))
    _, _, ran = replays[-1]
    if origin == "forward" and at < layers - 2:
        assert max(index for _, index in ran) <= at + 1
    if origin == "backward":
        assert min(index for kind, index in ran if kind == "backward") >= at - 1


def test_the_report_counts_partial_replays_apart(monkeypatch):
    report = bisect_nan(request_of(layers=16, at=5))
    assert report.run["strategy"] == "bisect"
    assert 0 < report.run["partial_replays"] <= 6
    assert report.findings[0].where.module == "5"
    plain = bisect_nan(ReplayRequest(factory=f"{FILE}:make_run", arguments={"layers": 16, "at": 5}))
    assert (plain.run["strategy"], "partial_replays" in plain.run) == ("trace", False)
    assert report_as_dict(report)["findings"] == report_as_dict(plain)["findings"]  # a NaN is equal to itself there
    assert report.run["bad_step_replays"] == plain.run["bad_step_replays"]


# -- where the premise fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2])
def test_a_masked_nan_is_not_taken_for_the_culprit(at):
    report = bisect_nan(request_of(kind="masked", layers=4, at=at))
    assert report.findings[0].where.module == f"layers.{at}"
    assert report.findings[0].where.phase == "forward"


def test_a_nan_that_travels_beside_the_layers_is_traced():
    report = bisect_nan(request_of(kind="beside", layers=6))
    where = report.findings[0].where
    assert (where.module, where.op, where.phase) == ("", "aten.log", "forward")
    assert report.run["strategy"] == "bisect"
    assert any("traced instead" in note for note in report.run["notes"])


# -- what is left behind ---------------------------------------------------------------------------------------------


def state_of(session):
    """Without gradients: the next step of these runs begins by clearing them."""
    parts = [
        session.model.state_dict(),
        [optimizer.state_dict() for optimizer in session.optimizers.values()],
        session.scaler.state_dict(),
        torch.get_rng_state(),
        random.getstate(),
    ]
    return copy.deepcopy(parts)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def hooks_of(session):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    modules = sum(len(getattr(module, table)) for module in session.model.modules() for table in tables)
    parameters = [p for p in session.model.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return modules, parameters


@pytest.mark.parametrize(("kind", "origin"), [("tower", "backward"), ("swallowing", "forward")])
def test_the_run_is_bit_by_bit_as_it_was(kind, origin):
    with harmed_step(request_of(kind=kind, origin=origin)) as harmed:
        session, _, _, _ = harmed
        before, replays, engine = state_of(session), session.replays, torch.autograd.Variable._execution_engine
        trace = LayerSearch(*harmed).trace()
        assert culprits(trace)[0].where.module.endswith("3")
        assert same(before, state_of(session))
        assert session.replays == replays + 1, "the one that confirms; partial ones are counted apart"
        assert hooks_of(session) == (0, [])
        assert torch.autograd.Variable._execution_engine is engine
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()


# -- the command line ------------------------------------------------------------------------------------------------


def test_a_strategy_that_is_none_is_refused(run_here):
    assert run_here("bisect-nan", f"{FILE}:make_run", "--strategy", "guess").returncode == 2
    with pytest.raises(UsageError, match="guess"):
        ReplayRequest(factory="pkg:make", strategy="guess")
