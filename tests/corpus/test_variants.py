"""The corpus grown from outside: names, seeds, widths, depth, layers, batches and loop change, and the diagnosis moves.

What a variant's label says follows from the change (`variants.expected`); that the variant still fails there is shown
by a plain loop first (`variants.fails_as_labelled`), and a seed with which it does not is passed over.
"""

from __future__ import annotations

import functools

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from fixtures.corpus import runs
from tests.corpus import variants
from tests.corpus.judging import disagreements_with, worst_finding
from tests.corpus.reports import CASES, SICK, policies, text_of, uses_transformers

FACTORY = "tests/corpus/variants.py:make_run"
COUNTED = [case for case in SICK if runs.label(case).get("silent_kind") == "stuck_state" and runs.label(case)["step"]]
"""What happens at a step because so many came before it, whatever their batches are."""
DROWNED = ("rotary_positions_bf16", "linear_attention_normaliser_inf")
"""What no gradient of the step shows any more, once another batch is accumulated into it."""
LATE = [case for case in SICK if runs.label(case)["step"] > 0 and case not in COUNTED]
NAMED = [case for case in SICK if runs.label(case)["culprit_module"]]
DEFAULT_LOOP = [case for case in CASES if "def train_step" not in text_of(case)]
ONE_OF_A_KIND = {runs.label(case)["kind"]: case for case in reversed(CASES) if not uses_transformers(case)}.values()
"""The cases that are grown with every `make test`."""
SEEDS = 40
"""Seeds tried until enough of them fail as labelled."""

WIDER = {
    case: widths.split()
    for widths, cases in {
        "c": """
            bn_stats_poisoned_by_outlier clip_before_unscale groupnorm_manual_square healthy_initial_scale_skips
            minibatch_stddev_eps nan_buffer_frozen_bn nan_pixel_in_batch optimizer_step_on_scaled_grads
            scaler_state_lost_on_resume vae_decoder_conv_overflow
        """,
        "c d": """
            triplet_sqrt_clamp_1e12
        """,
        "d": """
            adam_eps_half_embedding adam_state_inf_checkpoint bce_half_backward box_coder_log_eps ce_all_ignored_batch
            ema_half_frozen grad_underflow_no_scaler healthy_gpt_neg_inf_mask healthy_nan_masked_by_relu
            healthy_sparse_embedding moe_idle_expert_mean ppo_ratio_exp_half rmsnorm_silent_zero
            scale_collapsed_then_underflow scaler_state_zero_checkpoint softmax_then_log static_loss_scale_overflow
            supcon_log_of_underflow
        """,
        "d_ff": """
            t5_ffn_wo_overflow
        """,
        "d_model d_ff": """
            healthy_t5_bias_log_zero mt5_gated_ffn_overflow
        """,
        "d_model d_ff d_kv": """
            bf16_checkpoint_saved_as_fp16
        """,
        "h": """
            constant_column_std_zero cosine_similarity_zero_half healthy_dead_relu_zero_grads infonce_exp_fp32_too
            no_valid_scale_collapse
        """,
        "hidden_size intermediate_size": """
            bf16_adamw_stagnation clip_logit_scale_overflow healthy_bf16_beyond_fp16 vit_raw_16bit_pixels
        """,
    }.items()
    for case in cases.split()
}
"""Widths that a case can double by their names; the others spell a width out where something is planted in a weight."""

DEEPER = """
    adam_eps_half_embedding bf16_adamw_stagnation bf16_checkpoint_saved_as_fp16 bn_stats_poisoned_by_outlier
    ce_all_ignored_batch clip_logit_scale_overflow fp8_e5m2_wrong_max gpt2_attn_scale_after_matmul
    grad_underflow_no_scaler healthy_bf16_beyond_fp16 healthy_gpt_neg_inf_mask healthy_nan_masked_by_relu
    healthy_t5_bias_log_zero mt5_gated_ffn_overflow no_valid_scale_collapse ppo_ratio_exp_half softmax_then_log
    static_loss_scale_overflow t5_ffn_wo_overflow vit_raw_16bit_pixels
""".split()
"""Cases with a stack whose length is one number."""

MOVED = [
    ("adam_state_inf_checkpoint", "gate", "value"),
    ("adam_state_inf_checkpoint", "gate", "enc.2"),
    ("bf16_checkpoint_saved_as_fp16", "encoder.block.1.layer.0.layer_norm", "decoder.block.0.layer.1.layer_norm"),
    ("bf16_checkpoint_saved_as_fp16", "encoder.block.1.layer.0.layer_norm", "encoder.block.0.layer.1.layer_norm"),
    ("fp8_e5m2_wrong_max", "blocks.1.fc1", "blocks.0.fc1"),
    ("fp8_e5m2_wrong_max", "blocks.1", "blocks.2"),
    ("gpt2_attn_scale_after_matmul", "transformer.h.1.attn", "transformer.h.2.attn"),
    ("gpt2_attn_scale_after_matmul", "transformer.h.1", "transformer.h.0"),
    ("groupnorm_manual_square", "layers.3", "layers.1"),
    ("groupnorm_manual_square", "layers.3", "layers.4"),
    ("moe_idle_expert_mean", "moe1", "moe2"),
    ("mt5_gated_ffn_overflow", "decoder.block.1.layer.2", "decoder.block.0.layer.2"),
    ("mt5_gated_ffn_overflow", "decoder.block.1.layer.2.DenseReluDense", "encoder.block.1.layer.1.DenseReluDense"),
    ("nan_buffer_frozen_bn", "stages.2", "stages.0"),
    ("nan_buffer_frozen_bn", "stages.2.bn_pw", "stages.3.bn_dw"),
    ("t5_ffn_wo_overflow", "encoder.block.1.layer.1", "encoder.block.2.layer.1"),
    ("t5_ffn_wo_overflow", "encoder.block.1.layer.1", "encoder.block.0.layer.1"),
    ("vae_decoder_conv_overflow", "up.1", "up.0"),
    ("vae_decoder_conv_overflow", "up.1", "mid.0"),
]
"""Two submodules of one shape, the first with the culprit in it."""

# libraries of the corpus speak up while their models are built; none of it is ours
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
slow = pytest.mark.slow


def diagnosed(case, changes, policy, folder):
    checkpoint = None
    if runs.has_checkpoint(case) and "fixed" not in changes:
        checkpoint = str(folder / "checkpoint.pt")
        variants.write_checkpoint(case, changes, checkpoint)
    arguments = {"case": case, "changes": changes}
    return bisect_nan(ReplayRequest(factory=FACTORY, arguments=arguments, policy=policy, checkpoint=checkpoint))


def assert_as_labelled(case, changes, policy, folder):
    """The report says what the variant's label says."""
    report = diagnosed(case, changes, policy, folder)
    label = variants.expected(case, changes)
    worst = worst_finding(report)
    if label["kind"] == "healthy":
        assert worst is None, worst.message
        assert report.complete
        return
    assert disagreements_with(label, report, policy) == [], worst.message if worst else report.errors
    if "accumulated" in changes and label["phase"] in ("forward", "loss", "data"):
        assert worst.where.micro_batch == label["micro_batch"]


@functools.cache
def _seed(case, changes, policy):
    return next(
        (n for n in range(1, SEEDS + 1) if variants.fails_as_labelled(case, {**dict(changes), "seed": n}, policy)), None
    )


def failing(case, changes, policy):
    """The variant with the first seed with which it provably fails as labelled."""
    frozen = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in changes.items())
    seed = _seed(case, frozen, policy)
    assert seed is not None, f"none of {SEEDS} seeds fails as labelled"
    return {**changes, "seed": seed}


def with_policies(cases):
    return pytest.mark.parametrize(("case", "policy"), [(case, policy) for case in cases for policy in policies(case)])


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in ONE_OF_A_KIND else slow) for case in CASES])
def test_other_names_and_another_seed(case, tmp_path):
    changes = {"wrapped": "net"}
    if case in NAMED:
        changes["nested"] = runs.label(case)["culprit_module"]
    variant = failing(case, changes, "cuda")
    assert_as_labelled(case, variant, "cuda", tmp_path)


@slow
@with_policies(CASES)
def test_a_compiled_model(case, policy, tmp_path):
    if case == "exp_before_clamp":
        pytest.skip("torch's compiled wrapper takes no subscripts, and the case's loss uses one")
    assert_as_labelled(case, {"compiled": True}, policy, tmp_path)


@slow
@with_policies(NAMED)
def test_a_recomputed_culprit(case, policy, tmp_path):
    assert_as_labelled(case, {"recomputed": runs.label(case)["culprit_module"]}, policy, tmp_path)


@slow
@pytest.mark.parametrize("case", WIDER)
def test_another_width(case, tmp_path):
    variant = failing(case, {"wider": WIDER[case]}, "cuda")
    assert_as_labelled(case, variant, "cuda", tmp_path)


@slow
@pytest.mark.parametrize("case", DEEPER)
def test_another_depth(case, tmp_path):
    variant = failing(case, {"deeper": 1}, "cuda")
    assert_as_labelled(case, variant, "cuda", tmp_path)


@pytest.mark.parametrize(
    ("case", "culprit", "other"),
    [
        pytest.param(*moved, marks=slow if uses_transformers(moved[0]) or before[0] == moved[0] else ())
        for before, moved in zip([("",), *MOVED], MOVED, strict=False)
    ],
)
def test_the_culprit_in_another_layer(case, culprit, other, tmp_path):
    changes = {"swapped": [culprit, other]}
    policy = "native" if runs.label(case)["cuda_policy"] == "moves" else "cuda"
    assert variants.fails_as_labelled(case, changes, policy)
    assert_as_labelled(case, changes, policy, tmp_path)


@slow
@pytest.mark.parametrize("change", [{"later": 2}, {"sooner": 1}], ids=str)
@pytest.mark.parametrize("case", LATE)
def test_the_bad_batch_at_another_step(case, change, tmp_path):
    if not variants.fails_as_labelled(case, change, "cuda"):
        change = failing(case, change, "cuda")
    assert_as_labelled(case, change, "cuda", tmp_path)


@slow
@with_policies(DEFAULT_LOOP)
def test_the_step_written_out_by_hand_around_a_wrapped_model(case, policy, tmp_path):
    assert_as_labelled(case, {"loop": True, "wrapped": "module"}, policy, tmp_path)


@slow
@with_policies([case for case in DEFAULT_LOOP if case not in (*COUNTED, *DROWNED)])
def test_two_batches_a_step(case, policy, tmp_path):
    change = {"accumulated": 2}
    if not variants.fails_as_labelled(case, change, policy):
        change = failing(case, change, policy)
    assert_as_labelled(case, change, policy, tmp_path)


@slow
@pytest.mark.parametrize("case", SICK)
def test_the_labels_own_fix_leaves_nothing_to_report(case, tmp_path):
    report = diagnosed(case, {"fixed": True}, "cuda", tmp_path)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if runs.label(case)["mode"] == "pure" and runs.label(case)["kind"] != "optimizer_precision":
        # what else is wrong with it: a learning rate that weights of this format cannot follow, with no fp32 copy
        errors = [finding for finding in errors if finding.where.op != "aten.add_"]
    assert [finding.message for finding in errors] == []
    assert report.complete
