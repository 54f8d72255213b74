"""What each module should compute in, with the reason: the rows of a precision advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX
from ampdoctor.evidence.run_facts import OVERFLOWED, ModuleFacts, PrecisionFacts, PrecisionRow, RowPrecision

SQUARE_LIMIT = 256.0
"""From this magnitude on a square is beyond fp16."""
COARSE_LOGITS = 0.5
"""Half a unit in the last place of the largest logits from which rounding them moves a weight by exp(0.5), 65 %."""
_MANTISSA = {"fp16": 10, "bf16": 7}

_SOFTMAXES = frozenset({"softmax", "log_softmax", "safe_softmax", "_safe_softmax"})
_ATTENTION = "scaled_dot_product_attention"
_NORMS = frozenset(
    {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_group_norm"}
    | {"batch_norm", "native_batch_norm", "_native_batch_norm_legit", "instance_norm"}
)
_STATISTICS = frozenset(
    {"mean", "sum", "pow", "square", "var", "std", "var_mean", "norm", "linalg_vector_norm", "rsqrt", "sqrt"}
)
_CROSS_ENTROPY = "cross_entropy_loss"
_LOSSES = frozenset(
    {_CROSS_ENTROPY, "nll_loss", "nll_loss2d", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"}
    | {"huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "ctc_loss", "poisson_nll_loss"}
    | {"cosine_embedding_loss", "margin_ranking_loss", "multi_margin_loss", "soft_margin_loss", "triplet_margin_loss"}
    | {"hinge_embedding_loss", "multilabel_margin_loss", "cosine_similarity", "logsumexp"}
)
_PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "bilinear", "lstm", "gru", "rnn_tanh"}
    | {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"}
    | {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "rnn_relu", _ATTENTION}
)


def table(
    facts: PrecisionFacts,
    half: RowPrecision,
    islands: Mapping[str, str],
    eighth: Mapping[str, tuple[RowPrecision, str]],
) -> Iterator[PrecisionRow]:
    """The rows of a run in half precision.

    Args:
        facts: What was measured.
        half: `fp16` or `bf16`: what is neither kept wide nor taken by FP8.
        islands: Modules to keep in fp32, with the reason.
        eighth: What FP8 takes, or leaves, with the reason; {} where it is not chosen.
    """
    for module in facts.modules:
        yield from _own_ops(module, half)
        if module.name in islands:
            wide: RowPrecision = "tf32" if facts.target.tf32 and _computes_products(module) else "fp32"
            tail = "; its products may use TF32" if wide == "tf32" else ""
            yield _row(module, "", wide, islands[module.name] + tail)
        elif module.name in eighth:
            yield _row(module, "", *eighth[module.name])
        elif _statistics(module) is not None:
            computed = _statistics(module)
            yield _row(module, "", "fp32", f"{_norm_reason(computed)}; it computes in {computed} now")
        elif _computes_products(module):
            yield _row(module, "", half, f"matrix products: operands in {half}, sums in fp32")
        elif "embedding" in module.ops:
            yield _row(module, "embedding", "fp32", "autocast casts no look-up: its rows come out as they are stored")
    seen = {module.name for module in facts.modules}
    for name in sorted(islands.keys() - seen):
        yield PrecisionRow(module=name, type="", part="", precision="fp32", reason=islands[name])


def wide_table(facts: PrecisionFacts, wide: RowPrecision, why: str) -> Iterator[PrecisionRow]:
    """The rows of a run in TF32 or fp32: its products."""
    for module in facts.modules:
        if _computes_products(module):
            yield _row(module, "", wide, why)


def logit_remedies(facts: PrecisionFacts, half: RowPrecision) -> Iterator[str]:
    """What to do about logits that half precision cannot tell apart, or cannot hold."""
    for module in facts.modules:
        amax = module.logits_amax
        if amax is None or half not in _MANTISSA:
            continue
        name = module.name or "the model or its loss"
        if amax >= OVERFLOWED:
            yield f"{name}: logits overflow: scale the queries before the product, or normalise both factors"
        elif half == "fp16" and amax >= FP16_MAX / 2:
            yield f"{name}: logits reach {amax:.5g}: scale the queries before the product, or normalise both factors"
        elif _ulp(amax, half) / 2 >= COARSE_LOGITS and _half_logits(module):
            yield (
                f"{name}: logits reach {amax:.5g}, where {half} has steps of {_ulp(amax, half):g}: normalise queries "
                "and keys, or compute this product in fp32"
            )


def loss_remedies(facts: PrecisionFacts) -> Iterator[str]:
    """Losses that compute in half; of torch's cross entropy under autocast that is the log-softmax, not the sum."""
    for module in facts.modules:
        for op, computed in module.ops.items():
            if op in _LOSSES and computed in _MANTISSA:
                part, given = ("takes its log-softmax", "logits") if op == _CROSS_ENTROPY else ("computes", "inputs")
                where = module.name or "the loss"
                yield f"{_called(op)} in {where} {part} in {computed}: give it {given}.float()"


def _own_ops(module: ModuleFacts, half: RowPrecision) -> Iterator[PrecisionRow]:
    """One row for each op of the module's own forward that has a precision of its own."""
    for op, computed in module.ops.items():
        kept = "autocast does so" if computed == "fp32" else f"it computes in {computed} now"
        if op in _NORMS:
            yield _row(module, op, "fp32", f"{_norm_reason(computed)}; {kept}")
        elif op == _CROSS_ENTROPY:
            fmt = computed if computed in _MANTISSA else half
            bits = f"{fmt} keeps {_MANTISSA[fmt] + 1} bits"
            yield _row(module, op, "fp32", f"its log-softmax takes the logits' format, now {computed}; {bits}")
        elif op in _LOSSES:
            yield _row(module, op, "fp32", f"a sum over the batch, which fp16 ends at 65504; {kept}")
        elif op in _SOFTMAXES:
            yield _row(module, op, "fp32", f"exponentials and a sum{_logits(module, half)}; {kept}")
        elif op == _ATTENTION:
            inside = "a fused kernel keeps its logits and their softmax in fp32 inside"
            yield _row(module, op, half, f"{inside}{_logits(module, half)}")


def _logits(module: ModuleFacts, half: RowPrecision) -> str:
    if module.logits_amax is None:
        return ""
    if module.logits_amax >= OVERFLOWED:
        return "; its logits overflow"
    step = f", where {half} has steps of {_ulp(module.logits_amax, half):.2g}" if half in _MANTISSA else ""
    return f"; logits reach {module.logits_amax:.3g}{step}"


def _ulp(magnitude: float, half: str) -> float:
    """Distance between neighbours of a half format at a magnitude in its normal range."""
    if not 0.0 < magnitude < math.inf:
        return magnitude
    return 2.0 ** (math.frexp(magnitude)[1] - 1 - _MANTISSA[half])


def _half_logits(module: ModuleFacts) -> bool:
    """The logits themselves are a half tensor: made by a product of the module's own, outside a fused kernel."""
    products = (module.ops.get(op) for op in _PRODUCTS - {_ATTENTION})
    return any(op in _SOFTMAXES for op in module.ops) and any(computed in _MANTISSA for computed in products)


def _norm_reason(computed: str | None) -> str:
    if computed == "bf16":
        return "a mean of squares has 8 bits in bf16"
    return f"a square is beyond fp16 from |x| = {SQUARE_LIMIT:g} on"


def _statistics(module: ModuleFacts) -> str | None:
    """The half format in which a norm that is written out in ops takes its mean; None where there is none."""
    if "norm" not in module.type.lower():
        return None
    return next((module.ops[op] for op in sorted(_STATISTICS & module.ops.keys()) if module.ops[op] in _MANTISSA), None)


def _computes_products(module: ModuleFacts) -> bool:
    return bool((_PRODUCTS - {_ATTENTION}) & module.ops.keys())


def _called(op: str) -> str:
    return "cross_entropy" if op == _CROSS_ENTROPY else op


def _row(module: ModuleFacts, part: str, precision: RowPrecision, reason: str) -> PrecisionRow:
    return PrecisionRow(module=module.name, type=module.type, part=part, precision=precision, reason=reason)
