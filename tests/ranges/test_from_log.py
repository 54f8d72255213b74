"""A profile from the details of a run's log."""

from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.errors import UsageError
from ampdoctor.evidence.log_records import DetailLine, RunLine, StepLine, TensorDetail
from ampdoctor.evidence.run_facts import Place
from ampdoctor.numerics.counting import count
from ampdoctor.ranges.from_log import profile_from_log
from ampdoctor.ranges.profile import Collector, RunFacts

SCALER = {"scale": 4.0, "growth_interval": 2000, "name": "scaler"}
HEADER = RunLine(name="test", tensors=("fc.weight", "fc"), precision="fp16", scaler=SCALER, accumulation=2)
WEIGHT, GRADIENT, OUTPUT = (
    Place("fc.weight", "weight", "parameter"),
    Place("fc.weight", "weight_grad", "parameter"),
    Place("fc", "activation_grad", "output"),
)


def counted(tensor, role, values, scale=1.0, **more):
    return TensorDetail(
        tensor=tensor,
        role=role,
        scale=None if scale == 1.0 else scale,
        elements=values.numel(),
        histogram=count(values * scale).to_dict(),
        **more,
    )


def details(scales, gradients, header=HEADER):
    """A detail in each step, of gradients that carry a scale."""
    made = []
    for step, (scale, values) in enumerate(zip(scales, gradients, strict=True)):
        tensors = (
            counted(0, "parameter", torch.ones(8, 8)),
            counted(0, "gradient", values, scale),
            counted(1, "activation_gradient", values, scale, part="output", format="fp16"),
        )
        made.append((header, DetailLine(step=step, tensors=tensors)))
    return made


def gradients(steps):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 8, generator=generator) * 1e-3 for _ in range(steps)]


def test_it_is_the_profile_of_the_unscaled_gradients():
    values = gradients(3)
    profile = profile_from_log(
        details([4.0, 4.0, 2.0], values), [StepLine(step=s, loss=-s, loss_scale=2.0) for s in range(3)]
    )
    collector = Collector()
    collector.add_weights({WEIGHT: count(torch.ones(8, 8))})
    for one in values:
        collector.add_step({GRADIENT: count(one), OUTPUT: count(one)})
    expected = collector.profile(RunFacts(precision="fp16"), half=lambda _: True, weight=lambda _: 64)
    assert profile.sites == expected.sites
    assert [h.counts.tolist() for h in profile.histograms] == [h.counts.tolist() for h in expected.histograms]
    for name in ("amax", "nonzero", "power", "flushed", "error"):
        assert getattr(profile.series, name).tolist() == pytest.approx(getattr(expected.series, name), rel=1e-6)
    assert profile.run == RunFacts(
        precision="fp16", scaler={"scale": 2.0, "growth_interval": 2000}, loss_scale=2.0, accumulation=2, loss_amax=2.0
    )


def test_a_step_whose_gradients_overflow_is_left_out():
    values = gradients(3)
    values[1][0, 0] = math.inf
    profile = profile_from_log(details([4.0] * 3, values), [])
    assert (profile.steps, profile.nonfinite_steps) == (2, ())
    assert all(h.pos_infs == 0 for h in profile.histograms)


def test_the_details_of_a_step_may_lie_in_several_lines_and_calls():
    ((header, line),) = details([1.0], gradients(1))
    apart = [(header, DetailLine(step=0, tensors=(tensor,))) for tensor in (*line.tensors, line.tensors[2])]
    profile = profile_from_log(apart, [])
    assert profile.steps == 1
    by_place = {site.place: h for site, h in zip(profile.sites, profile.histograms, strict=True)}
    assert (by_place[GRADIENT].numel, by_place[OUTPUT].numel) == (64, 128)


def test_a_sample_stands_for_all_elements():
    values = gradients(1)[0]
    sample = TensorDetail(tensor=0, role="gradient", elements=640, sampled=64, histogram=count(values).to_dict())
    profile = profile_from_log([(HEADER, DetailLine(step=0, tensors=(sample,)))], [])
    assert profile.histograms[0].numel == 640


@pytest.mark.parametrize(
    ("autocast", "own", "module", "half"),
    [
        (True, "fp32", None, True),
        (True, "fp32", "fp32", False),
        (False, "fp32", None, False),
        (False, "fp16", None, True),
        (None, None, None, True),
    ],
)
def test_a_gradient_is_half_where_its_module_computes_so(autocast, own, module, half):
    header = RunLine(name="test", tensors=HEADER.tensors, precision="fp16", autocast=autocast)
    tensors = [counted(0, "gradient", torch.ones(4), format=own)]
    if module is not None:
        tensors.append(TensorDetail(tensor=1, role="activation", part="output", format=module))
    profile = profile_from_log([(header, DetailLine(step=0, tensors=tuple(tensors)))], [])
    assert [site.half for site in profile.sites if site.place == GRADIENT] == [half]


def test_what_a_profile_does_not_hold_is_passed_by():
    more = (
        counted(0, "update", torch.ones(4)),
        counted(0, "optimizer_state", torch.ones(4), part="exp_avg"),
        counted(1, "activation", torch.ones(4), part="elsewhere"),
        counted(7, "gradient", torch.ones(4)),
        TensorDetail(tensor=0, role="gradient", norm=1.0),
    )
    ((header, line),) = details([1.0], gradients(1))
    profile = profile_from_log([(header, line), (header, DetailLine(step=0, tensors=more))], [])
    assert {site.place for site in profile.sites} == {WEIGHT, GRADIENT, OUTPUT}


def test_a_log_without_histograms_says_so():
    tensor = TensorDetail(tensor=0, role="gradient", norm=1.0)
    with pytest.raises(UsageError, match="no histogram of a finite gradient"):
        profile_from_log([(HEADER, DetailLine(step=0, tensors=(tensor,)))], [])


def test_a_histogram_that_contradicts_itself_is_refused():
    histogram = {**count(torch.ones(4)).to_dict(), "amax": (2.0).hex()}
    tensor = TensorDetail(tensor=0, role="gradient", histogram=histogram)
    with pytest.raises(UsageError, match="contradict themselves"):
        profile_from_log([(HEADER, DetailLine(step=0, tensors=(tensor,)))], [])
