from __future__ import annotations

import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.diagnosis.replay.precision import advise_precision, fp8_fit
from ampdoctor.errors import UsageError
from ampdoctor.evidence.run_facts import OVERFLOWED, ModuleFacts, PrecisionFacts, ScaleFacts, Spread, UpdateFacts
from ampdoctor.evidence.targets import TARGETS, target_named


def linear(name, *, parameters=1 << 22, ops=None, multiple=True, smallest=2048, **fields):
    return ModuleFacts(
        name=name,
        type="Linear",
        parameters=parameters,
        ops=ops or {"linear": "fp16"},
        gemm_multiple_of_16=multiple,
        gemm_smallest=smallest,
        **fields,
    )


MODULES = (
    ModuleFacts(name="tok", type="Embedding", parameters=1 << 20, ops={"embedding": "fp32"}),
    ModuleFacts(name="norm", type="LayerNorm", parameters=4096, ops={"layer_norm": "fp32"}),
    *(linear(f"block.{i}") for i in range(6)),
    ModuleFacts(name="", type="Net", ops={"add": "fp32", "cross_entropy_loss": "fp32"}),
)

SCALE = ScaleFacts(exponent=12)


def facts(target="a100", own="fp16", *, scale=SCALE, modules=MODULES, **fields):
    given = {"fp16_error": 7e-4, "bf16_error": 5e-3, **fields}
    return PrecisionFacts(target=TARGETS[target], own=own, scale=scale, modules=modules, **given)


def spreads(forward, backward, names=tuple(f"block.{i}" for i in range(6))):
    kinds = (("activation", forward), ("weight", forward), ("activation_grad", backward))
    return tuple(Spread(module=n, kind=kind, log2_span=b) for n in names for kind, b in kinds)


def row(advice, module, part=""):
    (found,) = [r for r in advice.rows if (r.module, r.part) == (module, part)]
    return found


# -- the run's precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "precision", "alternative"), [("fp16", "fp16", "bf16"), ("bf16", "bf16", "fp16"), ("fp32", "bf16", "fp16")]
)
def test_where_both_formats_fit_both_are_called_fine_and_the_runs_own_is_kept(own, precision, alternative):
    advice = advise_precision(facts(own=own))
    assert (advice.precision, advice.alternative) == (precision, alternative)
    assert "both fine" in advice.why
    assert "0.0007 away from fp32's against BF16's 0.005" in advice.why
    assert advice.fp32_modules() == ()


def test_who_needs_precision_gets_the_finer_format_but_not_where_the_backward_goes_through_bf16():
    assert advise_precision(facts(own="fp32", precision_matters=True)).precision == "fp16"
    assert advise_precision(facts("mi200", own="fp32", precision_matters=True)).precision == "bf16"


@pytest.mark.parametrize("target", ["v100", "t4"])
def test_without_native_bf16_fp16_is_taken_where_it_fits_and_fp32_where_it_does_not(target):
    advice = advise_precision(facts(target, own="fp32"))
    assert (advice.precision, advice.alternative) == ("fp16", None)
    assert any("including_emulation=False" in note for note in advice.notes)
    wide = advise_precision(
        facts(target, scale=ScaleFacts(exponent=4, modules_not_covered=("block.0", "block.1"), share=0.33))
    )
    assert wide.precision == "fp32"
    assert {r.precision for r in wide.rows} == {"fp32"}


def test_a_forward_near_fp16s_limit_is_bf16_where_there_is_bf16_and_an_island_where_there_is_none():
    forward = {"block.2": 40000.0, "block.3": 100.0}
    advice = advise_precision(facts(forward=forward))
    assert (advice.precision, advice.alternative) == ("bf16", None)
    assert "40,000" in advice.why
    assert advice.fp32_modules() == ()
    fp32_module = advise_precision(facts("v100", forward=forward))
    assert fp32_module.precision == "fp16"
    assert fp32_module.fp32_modules() == ("block.2",)
    assert "reach 40,000" in row(fp32_module, "block.2").reason
    assert advise_precision(facts(forward={"block.2": 32000.0})).precision == "fp16"


def test_few_modules_that_no_scale_serves_are_islands_and_many_ask_for_bf16():
    few = advise_precision(facts(scale=ScaleFacts(exponent=12, modules_not_covered=("block.5",), share=0.15)))
    assert (few.precision, few.alternative) == ("fp16", "bf16")
    assert row(few, "block.5").precision == "tf32"
    assert "2^12" in row(few, "block.5").reason
    many = facts(scale=ScaleFacts(exponent=12, modules_not_covered=("block.4", "block.5"), share=0.33))
    assert advise_precision(many).precision == "bf16"
    assert "33%" in advise_precision(many).why
    assert advise_precision(many, thresholds_from({"AMP303": {"fp32_share": 0.4}})).precision == "fp16"


@pytest.mark.parametrize(
    "fields",
    [
        {"fp16_error": 0.05},
        {"forward": {"": 70000.0}},
        {"harm": "loss is not finite at step 3"},
        {"modules": (*MODULES, ModuleFacts(name="attn", type="Attention", product_amax=OVERFLOWED))},
    ],
)
def test_what_speaks_against_fp16_speaks_for_bf16(fields):
    assert advise_precision(facts(**fields)).precision == "bf16"


def test_a_run_in_pure_fp16_is_told_to_keep_fp32_weights():
    assert any("GradScaler refuses" in remedy for remedy in advise_precision(facts(pure=True)).remedies)


def test_where_neither_half_format_will_do_tf32_is_left():
    advice = advise_precision(facts(scale=ScaleFacts(exponent=-2), precision_matters=True))
    assert (advice.precision, advice.alternative) == ("tf32", "bf16")
    assert {r.precision for r in advice.rows} == {"tf32"}
    assert advice.fp32_modules() == ()


def test_hardware_that_flushes_subnormals_is_asked_what_the_forward_loses():
    assert advise_precision(facts("mi200", forward_flushed=1e-3)).precision == "fp16"
    lossy = advise_precision(facts("mi200", forward_flushed=0.05))
    assert lossy.precision == "bf16"
    assert "5.0%" in lossy.why
    assert advise_precision(facts("a100", forward_flushed=0.05)).precision == "fp16"


def test_a_cpu_computes_in_bf16():
    assert advise_precision(facts("cpu")).precision == "bf16"


# -- the table ---------------------------------------------------------------------------------------------------------


def test_norms_softmax_and_losses_are_fp32_with_their_reasons():
    modules = (
        *MODULES,
        ModuleFacts(name="attn", type="Attention", ops={"matmul": "fp16", "softmax": "fp32"}, logits_amax=20.0),
        ModuleFacts(name="sdpa", type="Attention", ops={"scaled_dot_product_attention": "fp16"}),
    )
    advice = advise_precision(facts(modules=modules))
    assert row(advice, "norm", "layer_norm").precision == "fp32"
    assert row(advice, "", "cross_entropy_loss").precision == "fp32"
    softmax = row(advice, "attn", "softmax")
    assert softmax.precision == "fp32"
    assert "logits reach 20, where fp16 has steps of 0.016" in softmax.reason
    assert row(advice, "attn").precision == "fp16"
    assert row(advice, "sdpa", "scaled_dot_product_attention").precision == "fp16"
    assert row(advice, "tok", "embedding").precision == "fp32"
    assert advice.remedies == ()


def test_a_norm_written_out_in_half_is_an_island_and_one_that_casts_up_itself_is_not():
    half = {"mul": "fp16", "mean": "fp16", "rsqrt": "fp32"}
    wide = {"pow": "fp32", "mean": "fp32", "mul": "fp16"}
    modules = (*MODULES, *(ModuleFacts(name=n, type="RMSNorm", ops=ops) for n, ops in (("half", half), ("wide", wide))))
    assert advise_precision(facts(modules=modules)).fp32_modules() == ("half",)


def test_a_loss_on_half_logits_is_told_to_take_float_ones():
    modules = (*MODULES[:-1], ModuleFacts(name="", type="Net", ops={"cross_entropy_loss": "fp16"}))
    advice = advise_precision(facts(modules=modules))
    assert advice.remedies == ("cross_entropy in the loss takes its log-softmax in fp16: give it logits.float()",)
    reason = row(advice, "", "cross_entropy_loss").reason  # the sum over the batch is in fp32 under autocast
    assert reason == "its log-softmax takes the logits' format, now fp16; fp16 keeps 11 bits"


@pytest.mark.parametrize(
    ("own", "ops", "logits", "told"),
    [
        ("bf16", {"matmul": "bf16", "softmax": "fp32"}, 200.0, True),
        ("bf16", {"matmul": "bf16", "softmax": "fp32"}, 100.0, False),
        ("fp16", {"matmul": "fp16", "softmax": "fp32"}, 2000.0, True),
        ("fp16", {"matmul": "fp16", "softmax": "fp32"}, OVERFLOWED, True),
    ],
)
def test_logits_are_remarked_on_where_the_format_can_no_longer_tell_them_apart(own, ops, logits, told):
    modules = (*MODULES, ModuleFacts(name="attn", type="Attention", ops=ops, logits_amax=logits))
    assert any("attn" in r for r in advise_precision(facts(own=own, modules=modules)).remedies) is told


# -- FP8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "backward", "target", "precision"),
    [
        (12.0, 15.0, "h100", "fp8 e4m3"),
        (12.0, 23.0, "h100", "fp8 hybrid"),
        (12.0, 33.0, "h100", "bf16"),
        (20.0, 23.0, "b200", "mxfp8"),
    ],
)
def test_the_format_follows_from_how_far_apart_a_products_values_lie(forward, backward, target, precision):
    advice = advise_precision(facts(target, own="bf16", spreads=spreads(forward, backward)))
    fits = precision != "bf16"
    assert advice.precision == ("fp8" if fits else "bf16")
    assert (row(advice, "block.2").precision) == precision
    if fits:
        assert f"a factor of 2^{forward:.1f}" in row(advice, "block.2").reason
        assert advice.alternative == "bf16"


def test_first_and_last_products_small_odd_and_unmeasured_ones_and_routers_stay_in_bf16():
    gate = linear("moe.gate")
    modules = (
        linear("stem"),
        *(linear(f"block.{i}") for i in range(6)),
        linear("small", smallest=512, parameters=512 * 512),
        linear("odd", multiple=False, parameters=1000),
        linear("unseen", parameters=1000),
        ModuleFacts(name="moe", type="MoE", ops={"topk": "fp32"}),
        gate,
        linear("mlp.gate"),
        linear("head"),
    )
    names = tuple(m.name for m in modules if m.name != "unseen")
    rows, _ = fp8_fit(facts("h100", own="bf16", modules=modules, spreads=spreads(12.0, 20.0, names)), "bf16")
    taken = {name for name, (precision, _) in rows.items() if precision != "bf16"}
    assert taken == {*(f"block.{i}" for i in range(6)), "mlp.gate"}
    assert "first" in rows["stem"][1]
    assert "router" in rows["moe.gate"][1]
    assert "512" in rows["small"][1]
    assert "multiple of 16" in rows["odd"][1]
    assert "not measured" in rows["unseen"][1]


def test_fp8_is_proposed_only_where_it_takes_most_of_the_products_and_where_there_is_fp8():
    few = (linear("a"), linear("b", parameters=1 << 10), linear("c"))
    advice = advise_precision(facts("h100", own="bf16", modules=few, spreads=spreads(12.0, 20.0, ("a", "b", "c"))))
    assert advice.precision == "bf16"
    assert any("FP8 would take 0%" in note for note in advice.notes)
    assert advise_precision(facts("a100", own="bf16", spreads=spreads(12.0, 20.0))).precision == "bf16"
    kept = advise_precision(facts("h100", own="fp16", spreads=spreads(12.0, 20.0)))
    assert kept.precision == "fp16"


# -- updates -----------------------------------------------------------------------------------------------------------


def update(lost, stagnant, name="block.0.weight"):
    return UpdateFacts(
        name=name,
        optimizer="torch.optim.adamw.AdamW",
        steps=2,
        elements=1000,
        updated=1.0,
        stagnant=stagnant,
        size=1.0,
        lost=lost,
        log2_ratio=-11.0,
    )


def test_a_run_in_pure_bf16_is_told_how_to_keep_its_updates_and_one_under_autocast_why_it_does():
    pure = advise_precision(facts(own="bf16", pure=True, updates=(update(0.9, 0.95),)))
    assert len(pure.remedies) == 3
    assert "90% of the update" in pure.remedies[0]
    assert "fp32" in pure.remedies[0]
    under = advise_precision(facts(own="bf16", updates=(update(0.9, 0.95),)))
    assert under.remedies == ()
    assert any("keep the weights in fp32" in note for note in under.notes)
    fine = advise_precision(facts(own="bf16", pure=True, updates=(update(0.3, 0.4),)))
    assert fine.remedies == ()


# -- the data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "family"), [("rtx3090", "rtx30"), ("GeForce RTX 2080 Ti", "rtx20"), ("rtx40", "rtx40")]
)
def test_a_card_is_of_its_family(card, family):
    assert target_named(card) is TARGETS[family]


def test_an_unknown_target_is_named_with_those_that_are_known():
    assert target_named("H100") is TARGETS["h100"]
    with pytest.raises(
        UsageError, match=r"unknown target 'tpu'; known are v100, t4, a100, l4, h100, b200, gtx10, .*rtx50, mi200, cpu"
    ):
        target_named("tpu")
