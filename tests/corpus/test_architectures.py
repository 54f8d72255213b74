"""No false alarm on 21 healthy architectures; and where one of their layers is made too loud, that layer is named."""

from __future__ import annotations

import random

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from fixtures.runs.architectures import ARCHITECTURES, layers
from tests.corpus.judging import worst_finding

FILE = "fixtures/runs/architectures.py"
LAYERS = 2
"""Layers made loud in each architecture, drawn with a fixed seed."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("precision", "policy"),
    [
        ({"precision": "fp16"}, "cuda"),
        ({"precision": "bf16"}, "native"),
        ({"precision": "bf16", "pure": True}, "cuda"),  # nothing is cast: both policies are one
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_healthy_architecture_raises_no_alarm(name, precision, policy):
    arguments = {"name": name, **precision}
    report = bisect_nan(ReplayRequest(factory=f"{FILE}:make_run", arguments=arguments, policy=policy, steps=5))
    assert [finding.message for finding in report.findings if finding.severity != "note"] == []
    assert (report.verdict, report.complete) == ("healthy", True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_loud_layer_is_named(name):
    candidates = layers(name)
    for layer in random.Random(0).sample(candidates, min(LAYERS, len(candidates))):
        arguments = {"name": name, "module": layer}
        finding = worst_finding(bisect_nan(ReplayRequest(factory=f"{FILE}:make_loud", arguments=arguments, steps=3)))
        assert (finding.cause, finding.where.module, finding.where.nonfinite) == ("forward_overflow", layer, "inf")
        assert finding.where.phase == "forward"
        assert finding.where.step == 0
