from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from ampdoctor.evidence.run_facts import OVERFLOWED
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.replay.session import Session
from tests.probes.traced import stepped

SPEC = importlib.util.spec_from_file_location("attention_runs", Path(__file__).parent / "attention_runs.py")
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)


def facts_of(run, policy="cuda"):
    session = Session(run, device=torch.device("cpu"))
    probe = FormatsProbe()
    with autocast_policy(policy):
        stepped(session, probe)
    return {facts.name: facts for facts in probe.facts()}


def test_each_module_has_its_own_ops_in_the_format_that_cudas_autocast_gives_them():
    facts = facts_of(runs.transformer(fused=False))
    assert facts["norm"].ops == {"layer_norm": "fp32"}
    assert facts["attn.qkv"].ops == {"linear": "fp16"}
    assert facts["tok"].ops == {"embedding": "fp32"}
    attention = facts["attn"].ops
    assert attention["softmax"] == "fp32"
    assert attention["matmul"] == "fp16"
    assert "linear" not in attention
    assert facts["rms"].ops["mean"] == "fp16"
    assert facts["attn"].type == "Attention"


def test_the_loss_belongs_to_the_model_itself_and_takes_its_log_softmax_in_the_logits_format():
    facts = facts_of(runs.transformer())
    assert facts[""].ops["cross_entropy_loss"] == "fp16"
    assert facts_of(runs.conv())[""].ops["cross_entropy_loss"] == "fp32"  # given float logits


@pytest.mark.parametrize(("length", "multiples"), [(17, True), (16, False)])
def test_products_are_multiples_of_16_only_if_the_rows_are_as_well(length, multiples):
    facts = facts_of(runs.transformer(length=length))  # 4 rows of length - 1 tokens each
    assert facts["up"].gemm_multiple_of_16 is multiples
    assert facts["up"].gemm_smallest == 32
    assert facts["norm"].gemm_multiple_of_16 is None


def largest_logit(run):
    """In fp32, by hand: the causal ones only."""
    model, ids = run.model, next(iter(run.batches))[:, :-1]
    with torch.no_grad():
        x = model.norm(model.tok(ids))
        b, n, width = x.shape
        q, k, _ = (t.view(b, n, 4, width // 4).transpose(1, 2) for t in model.attn.qkv(x).chunk(3, -1))
        logits = model.attn.gain * (q @ k.transpose(-1, -2)) / (width // 4) ** 0.5
        return float(logits.masked_select(torch.ones(n, n, dtype=torch.bool).tril()).abs().max())


@pytest.mark.parametrize("gain", [1.0, 40.0])
def test_the_largest_logits_are_those_that_the_softmax_takes_and_no_mask(gain):
    run = runs.transformer(fused=False, gain=gain)
    expected = largest_logit(run)
    assert facts_of(run)["attn"].logits_amax == pytest.approx(expected, rel=5e-3)


def test_logits_that_overflow_are_infinite():
    run = runs.transformer(fused=False, gain=2e4)
    session = Session(run, device=torch.device("cpu"))
    probe = FormatsProbe()
    with autocast_policy("cuda"), session.watched(probe):
        session.has_step(0)
        session.attempt(0)
    attention = {f.name: f for f in probe.facts()}["attn"]
    assert attention.logits_amax == OVERFLOWED
    assert attention.product_amax == OVERFLOWED  # before it is divided by anything


def test_a_product_is_seen_before_it_is_scaled_down():
    run = runs.transformer(fused=False, gain=2000.0)
    expected = largest_logit(run) * 8**0.5
    facts = facts_of(run)
    assert facts["attn"].product_amax >= expected * 0.99  # what is masked afterwards counts as well
    assert facts["norm"].product_amax is None
    assert facts["attn.qkv"].product_amax < 10.0


def test_a_convolutional_net_has_no_product_of_a_linear_layer_but_its_head():
    facts = facts_of(runs.conv())
    assert facts["0"].ops == {"conv2d": "fp16"}
    assert facts["1"].ops["batch_norm"] == "fp32"
    assert facts["0"].gemm_multiple_of_16 is None
    assert facts["5"].gemm_multiple_of_16 is False
    assert all(f.logits_amax is None for name, f in facts.items() if name)
