"""Which precision a run should have on given hardware, and which of its operations are exceptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ampdoctor.diagnosis.catalogue import figure
from ampdoctor.diagnosis.replay.scale_choice import FORWARD_HEADROOM, near_limit
from ampdoctor.diagnosis.replay.updates import all_updates, update_notes, update_remedies
from ampdoctor.diagnosis.scan.tensors import FP16_MAX
from ampdoctor.evidence.run_facts import (
    OVERFLOWED,
    ModuleFacts,
    PrecisionAdvice,
    PrecisionFacts,
    PrecisionRow,
    RowPrecision,
    RunPrecision,
)
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, ERROR_NOTE, FP32_SHARE, Thresholds

E4M3_BINADES = math.log2(448) + 10  # log2 of e4m3's largest number over its flush threshold, 2^-10
E5M2_BINADES = math.log2(57344) + 17  # log2 of e5m2's largest number over its flush threshold, 2^-17
SQUARE_LIMIT = 256.0  # from this magnitude on, a square overflows fp16
COARSE_LOGITS = 0.5
"""Half a unit in the last place of the largest logits from which their rounding changes a weight by exp(0.5), 65 %."""
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
    in_fp32: Mapping[str, str],
    eighth: Mapping[str, tuple[RowPrecision, str]],
) -> Iterator[PrecisionRow]:
    """Yields the rows of a run in half precision; `in_fp32` stay in fp32, `eighth` is what FP8 takes or leaves."""
    for module in facts.modules:
        yield from _own_ops(module, half)
        if module.name in in_fp32:
            wide: RowPrecision = "tf32" if facts.target.tf32 and _computes_products(module) else "fp32"
            tail = "; its products may use TF32" if wide == "tf32" else ""
            yield _row(module, "", wide, in_fp32[module.name] + tail)
        elif module.name in eighth:
            yield _row(module, "", *eighth[module.name])
        elif (computed := _statistics(module)) is not None:
            yield _row(module, "", "fp32", f"{_norm_reason(computed)}; it computes in {computed} now")
        elif _computes_products(module):
            yield _row(module, "", half, f"matrix products: operands in {half}, sums in fp32")
        elif "embedding" in module.ops:
            yield _row(module, "embedding", "fp32", "autocast casts no look-up: its rows come out as they are stored")
    seen = {module.name for module in facts.modules}
    for name in sorted(in_fp32.keys() - seen):
        yield PrecisionRow(module=name, type="", part="", precision="fp32", reason=in_fp32[name])


def logit_remedies(facts: PrecisionFacts, half: RowPrecision) -> Iterator[str]:
    """Yields what to do about logits that half precision cannot distinguish or represent."""
    for module in facts.modules:
        amax = module.logits_amax
        if amax is None or half not in _MANTISSA:
            continue
        name = module.name or "the model or its loss"
        reach = f"{name}: logits reach {figure(amax)}"
        if amax >= OVERFLOWED:
            yield f"{name}: logits overflow: scale the queries before the product, or normalise both factors"
        elif half == "fp16" and amax >= FP16_MAX / 2:
            yield f"{reach}: scale the queries before the product, or normalise both factors"
        elif _ulp(amax, half) / 2 >= COARSE_LOGITS and _half_logits(module):
            yield (
                f"{reach}, where {half} has steps of {_ulp(amax, half):g}: normalise queries "
                "and keys, or compute this product in fp32"
            )


def loss_remedies(facts: PrecisionFacts) -> Iterator[str]:
    """Yields losses that compute in half; torch's cross entropy under autocast does so in its log-softmax only."""
    for module in facts.modules:
        for op, computed in module.ops.items():
            if op in _LOSSES and computed in _MANTISSA:
                where = module.name or "the loss"
                if op == _CROSS_ENTROPY:
                    yield f"cross_entropy in {where} takes its log-softmax in {computed}: give it logits.float()"
                else:
                    yield f"{op} in {where} computes in {computed}: give it inputs.float()"


def _own_ops(module: ModuleFacts, half: RowPrecision) -> Iterator[PrecisionRow]:
    for op, computed in module.ops.items():
        kept = "autocast does so" if computed == "fp32" else f"it computes in {computed} now"
        if op in _NORMS:
            yield _row(module, op, "fp32", f"{_norm_reason(computed)}; {kept}")
        elif op == _CROSS_ENTROPY:
            fmt = computed if computed in _MANTISSA else half
            bits = f"{fmt} keeps {_MANTISSA[fmt] + 1} bits"
            yield _row(module, op, "fp32", f"its log-softmax takes the logits' format, now {computed}; {bits}")
        elif op in _LOSSES:
            yield _row(module, op, "fp32", f"a sum over the batch, and fp16's largest value is 65,504; {kept}")
        elif op in _SOFTMAXES:
            yield _row(module, op, "fp32", f"exponentials and a sum{_logits(module, half)}; {kept}")
        elif op == _ATTENTION:
            yield _row(module, op, half, "a fused kernel keeps its logits and their softmax in fp32 inside")


def _logits(module: ModuleFacts, half: RowPrecision) -> str:
    if module.logits_amax is None:
        return ""
    if module.logits_amax >= OVERFLOWED:
        return "; its logits overflow"
    step = f", where {half} has steps of {_ulp(module.logits_amax, half):.2g}" if half in _MANTISSA else ""
    return f"; logits reach {figure(module.logits_amax)}{step}"


def _ulp(magnitude: float, half: str) -> float:
    """Returns the spacing of a half format at a magnitude in its normal range."""
    if not 0.0 < magnitude < math.inf:
        return magnitude
    return 2.0 ** (math.frexp(magnitude)[1] - 1 - _MANTISSA[half])


def _half_logits(module: ModuleFacts) -> bool:
    """Whether the logits are a half tensor: the module's own product makes them, outside a fused kernel."""
    products = (module.ops.get(op) for op in _PRODUCTS - {_ATTENTION})
    return any(op in _SOFTMAXES for op in module.ops) and any(computed in _MANTISSA for computed in products)


def _norm_reason(computed: str | None) -> str:
    if computed == "bf16":
        return "a mean of squares has 8 bits in bf16"
    return f"a square is beyond fp16 from |x| = {SQUARE_LIMIT:g} on"


def _statistics(module: ModuleFacts) -> str | None:
    """Returns the half format in which a norm that is written in single ops takes its mean."""
    if "norm" not in module.type.lower():
        return None
    return next((module.ops[op] for op in sorted(_STATISTICS & module.ops.keys()) if module.ops[op] in _MANTISSA), None)


def _computes_products(module: ModuleFacts) -> bool:
    return bool((_PRODUCTS - {_ATTENTION}) & module.ops.keys())


def _row(module: ModuleFacts, part: str, precision: RowPrecision, reason: str) -> PrecisionRow:
    return PrecisionRow(module=module.name, type=module.type, part=part, precision=precision, reason=reason)


# -- FP8: which matrix products fit, and in which of its formats, by range, shape and place --


MARGIN = 1.0
"""Powers of two for growth of the largest value between the step that sets the scale and the step that uses it."""
SMALLEST = 1024
"""A smaller matrix loses more time to scaling and casting than FP8 gains (torchao's filters, measured on an H100)."""
MOST = 0.5  # share of the products' parameters from which FP8 is chosen for the run, and not for some layers only

FORWARD = frozenset({"activation", "weight"})
BACKWARD = "activation_grad"

_ROUTERS = frozenset({"router", "gate", "switch", "wg"})


def fp8_fit(facts: PrecisionFacts, other: RowPrecision) -> tuple[dict[str, tuple[RowPrecision, str]], float]:
    """Precision and reason of each module with a product, and the share of their parameters that FP8 takes.

    What does not fit is computed in `other`.
    """
    if not facts.target.fp8:
        return {}, 0.0
    products = [m for m in facts.modules if m.gemm_multiple_of_16 is not None]
    routed = {m.name for m in facts.modules if "topk" in m.ops}
    rows: dict[str, tuple[RowPrecision, str]] = {}
    for place, module in enumerate(products):
        against = _against(module, routed)
        if against is None and len(products) > 2 and place in {0, len(products) - 1}:
            which = "first" if place == 0 else "last"
            against = f"the {which} product of the model: what it rounds is read from the data or by the loss directly"
        rows[module.name] = (other, against) if against else _by_range(module.name, facts, other)
    weight = {m.name: m.parameters for m in products}
    taken = sum(weight[name] for name, (precision, _) in rows.items() if precision != other)
    total = sum(weight.values())
    return rows, taken / total if total else 0.0


def _against(module: ModuleFacts, routed: set[str]) -> str | None:
    """Returns why a product is unsuitable for FP8, whatever its range."""
    owner, _, leaf = module.name.rpartition(".")
    if "embedding" in module.ops:
        return "an embedding: a table look-up is no product"
    if leaf in _ROUTERS and (owner in routed or module.name in routed):
        return "a router: a rounded score sends a token elsewhere"
    if not module.gemm_multiple_of_16:
        return "a dimension of its products is no multiple of 16, which FP8 kernels want"
    if (module.gemm_smallest or 0) < SMALLEST:
        return (
            f"its smallest dimension is {module.gemm_smallest}: below {SMALLEST} scaling and casting cost more than "
            "FP8 wins"
        )
    return None


def _by_range(name: str, facts: PrecisionFacts, other: RowPrecision) -> tuple[RowPrecision, str]:
    spans = [(spread.kind, spread.log2_span) for spread in facts.spreads if spread.module == name]
    forward = max((span for kind, span in spans if kind in FORWARD), default=math.inf)
    backward = max((span for kind, span in spans if kind == BACKWARD), default=math.inf)
    if math.inf in {forward, backward}:
        return other, "the range of its operands was not measured"
    said = f"its forward spans a factor of 2^{forward:.1f} and its gradients 2^{backward:.1f}"
    if max(forward, backward) + MARGIN <= E4M3_BINADES:
        return "fp8 e4m3", f"{said}: E4M3 holds 2^{E4M3_BINADES:.1f}, less 2^{MARGIN:g} for drift"
    if forward + MARGIN <= E4M3_BINADES and backward + MARGIN <= E5M2_BINADES:
        holds = f"E4M3 holds 2^{E4M3_BINADES:.1f} and E5M2 2^{E5M2_BINADES:.1f}, less 2^{MARGIN:g} each"
        return "fp8 hybrid", f"{said}: {holds}"
    beyond = f"{said}: more than E4M3 (2^{E4M3_BINADES:.1f}) and E5M2 (2^{E5M2_BINADES:.1f}) hold under one scale"
    if facts.target.mxfp8:
        return "mxfp8", f"{beyond}; with a scale for each 32 elements only the spread within a block counts"
    return other, f"{beyond}, and {facts.target.name} has no MXFP8"


# -- the choice: a decision tree over measurements --
#
# In this order: does the forward fit fp16; does one loss scale serve the gradients; which half format is finer there;
# do bf16 weights keep their updates; what do TF32 and FP8 add. Where both half formats work, the advice names both.


PURE_FP16 = (
    "keep the weights in fp32 and let autocast compute in fp16: a GradScaler refuses fp16 gradients, and weights and "
    "moments in fp16 lose what is small"
)
FORWARD_FLUSHED = 1e-2
"""Share of the forward's operands that may flush to zero. For gradients, no harm was seen up to 1 %; for activations
nothing was measured."""


def advise_precision(facts: PrecisionFacts, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> PrecisionAdvice:
    """Returns the precision of the run and of each module on its target."""
    in_fp32 = _in_fp32(facts, thresholds)
    precision, why, alternative = _half(facts, in_fp32, thresholds)
    share_of_fp8 = 0.0
    rows: Iterator[PrecisionRow]
    if precision in {"fp16", "bf16"}:
        half: RowPrecision = "fp16" if precision == "fp16" else "bf16"
        eighth, share_of_fp8 = fp8_fit(facts, half)
        chosen = half == "bf16" and share_of_fp8 >= MOST
        if chosen:
            precision, alternative = "fp8", "bf16"
            why = (
                f"the products that hold {share_of_fp8:.0%} of the matrices' parameters fit FP8 and are large enough "
                "to gain; the rest, and all of it should the loss suffer, in BF16"
            )
        rows = table(facts, half, in_fp32 if half == "fp16" else {}, eighth if chosen else {})
        remedies = [*logit_remedies(facts, half), *loss_remedies(facts)]
    else:
        wide: RowPrecision = "tf32" if precision == "tf32" else "fp32"
        mantissa = "operands read with 10 mantissa bits, sums in fp32" if wide == "tf32" else "no narrower format fits"
        rows = (_row(module, "", wide, mantissa) for module in facts.modules if _computes_products(module))
        remedies = []
    pure_bf16 = facts.pure and facts.own == "bf16"
    if facts.pure and precision == "fp16":
        remedies.append(PURE_FP16)
    return PrecisionAdvice(
        target=facts.target.name,
        precision=precision,
        why=why,
        alternative=alternative,
        rows=tuple(rows),
        remedies=tuple(remedies + list(update_remedies(facts.updates) if pure_bf16 else [])),
        notes=tuple(_notes(facts, precision, share_of_fp8)),
    )


def _half(
    facts: PrecisionFacts, in_fp32: Mapping[str, str], thresholds: Thresholds
) -> tuple[RunPrecision, str, RunPrecision | None]:
    target, obstacle = facts.target, _obstacle(facts, in_fp32, thresholds)
    wide: RunPrecision = "tf32" if target.tf32 else "fp32"
    kept = f" with {_listed(in_fp32)} ({_share(facts, in_fp32):.1%} of the parameters) in fp32" if in_fp32 else ""
    if obstacle is None and not target.bf16:
        return "fp16", f"FP16 fits{_at_scale(facts)}{kept}, and {target.name} has no native BF16", None
    if obstacle is None and not in_fp32:
        both = f"FP16 and BF16 are both fine: FP16 fits{_at_scale(facts)}{_errors(facts)}"
        if facts.own == "fp16" or (facts.precision_matters and not target.bf16_backward):
            own = "and is what the run has" if facts.own == "fp16" else "and is the finer one, which was asked for"
            return "fp16", f"{both}, {own}; BF16 would need no loss scale", "bf16"
        return "bf16", f"{both}; BF16 needs no loss scale to look after", "fp16"
    gradients_only = facts.own == "fp16" and not _near(facts, thresholds)
    if obstacle is None and (gradients_only or facts.precision_matters):
        return "fp16", f"FP16 fits{_at_scale(facts)}{kept}; BF16 needs neither modules in fp32 nor a loss scale", "bf16"
    against = obstacle or f"FP16 fits only{kept}: {next(iter(in_fp32.values()))}"
    if target.bf16 and not facts.precision_matters:
        return "bf16", f"{against}; BF16 has the range of fp32", None
    if not target.bf16:
        return wide, f"{against}, and {target.name} has no native BF16", None
    return wide, f"{against}, and BF16's 8 bits are too few for what the run needs", "bf16"


def _in_fp32(facts: PrecisionFacts, thresholds: Thresholds) -> dict[str, str]:
    """Modules to keep in fp32 in a run in FP16, with the reason."""
    found = {name: _reach(amax, thresholds) for name, amax in _near(facts, thresholds).items()}
    if facts.scale is not None:
        for name in facts.scale.modules_not_covered:
            found.setdefault(
                name, f"its gradients need another loss scale than the 2^{facts.scale.exponent} of the others"
            )
    return found


def _obstacle(facts: PrecisionFacts, in_fp32: Mapping[str, str], thresholds: Thresholds) -> str | None:
    target, scale, share = facts.target, facts.scale, _share(facts, in_fp32)
    if not target.fp16:
        return f"{target.name} has no native fp16"
    if share > thresholds[FP32_SHARE]:
        worst = max(_near(facts, thresholds).items(), key=lambda item: (item[1], item[0]), default=None)
        forward = f": the forward reaches {figure(worst[1])} in {worst[0] or 'the model'}" if worst is not None else ""
        return f"FP16 would need {share:.0%} of the parameters in fp32{forward}"
    if "" in in_fp32:
        return f"FP16 does not fit the model's own forward or its loss: {in_fp32['']}"
    if scale is not None and scale.exponent < 0:
        return f"the largest loss scale that does not overflow fp16 is 2^{scale.exponent}, below 1"
    if facts.harm is not None and not facts.settled:  # some skipped steps are a scaler at work
        return f"in an FP16 replay {facts.harm}"
    if target.flushes_subnormals and facts.forward_flushed > FORWARD_FLUSHED:
        return f"{target.name} takes {facts.forward_flushed:.1%} of the forward's values for zero in FP16"
    error, other = facts.fp16_error, facts.bf16_error
    if error is not None and other is not None and error > max(thresholds[ERROR_NOTE], other):
        return f"FP16's gradients are expected {error:.2g} away from fp32's at its best loss scale, BF16's {other:.2g}"
    return None


def _near(facts: PrecisionFacts, thresholds: Thresholds) -> dict[str, float]:
    inside = {m.name: m.product_amax for m in facts.modules if m.product_amax is not None}
    largest = {
        name: max(facts.forward.get(name, 0.0), inside.get(name, 0.0)) for name in sorted(facts.forward.keys() | inside)
    }
    return {name: amax for name, amax in largest.items() if amax >= near_limit(thresholds)}


def _reach(amax: float, thresholds: Thresholds) -> str:
    if amax >= OVERFLOWED:
        return "a product in it overflows fp16"
    if amax > FP16_MAX:
        return f"its values reach {figure(amax)}, above fp16's largest, 65,504"
    near = f"{2.0 ** thresholds[FORWARD_HEADROOM]:.3g}"
    return f"its values reach {figure(amax)}, within a factor of {near} of fp16's largest, 65,504"


def _share(facts: PrecisionFacts, names: Mapping[str, str]) -> float:
    total = sum(m.parameters for m in facts.modules)
    inside = tuple(f"{name}." for name in names)
    held = sum(m.parameters for m in facts.modules if m.name in names or m.name.startswith(inside))
    measured = held / total if total else 0.0
    scale = facts.scale
    return max(measured, scale.share) if scale is not None and scale.modules_not_covered else measured


def _listed(names: Mapping[str, str]) -> str:
    shown = [name or "the model" for name in list(names)[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _at_scale(facts: PrecisionFacts) -> str:
    return f" at a loss scale of 2^{facts.scale.exponent}" if facts.scale is not None else ""


def _errors(facts: PrecisionFacts) -> str:
    if facts.fp16_error is None or facts.bf16_error is None:
        return ""
    said = f" (gradients {facts.fp16_error:.2g} away from fp32's against BF16's {facts.bf16_error:.2g}"
    return said + (", though its backward goes through bf16 there)" if facts.target.bf16_backward else ")")


def _notes(facts: PrecisionFacts, precision: RunPrecision, share_of_fp8: float) -> Iterator[str]:
    target = facts.target
    if not target.bf16:
        yield (
            f"{target.name} emulates BF16: torch.cuda.is_bf16_supported() says True there, "
            "is_bf16_supported(including_emulation=False) says what is native"
        )
    if target.flushes_subnormals:
        yield (
            f"{target.name} takes fp16 operands below 2^{target.fp16_flush:g} for zero in the forward: "
            f"{facts.forward_flushed:.2%} of the measured activations; the backward goes through bf16"
        )
    if target.tf32:
        yield 'fp32 products run in TF32 after torch.set_float32_matmul_precision("high"); it is off by default'
    if target.name == "cpu":
        yield "a CPU without AVX512_BF16, AMX or Arm's BF16 extension computes BF16 in fp32 and gains nothing"
    if precision in {"fp16", "bf16"} and target.fp8:
        yield (
            f"FP8 would take {share_of_fp8:.0%} of the parameters of the matrix products; it is proposed from "
            f"{MOST:.0%} on, over BF16"
        )
    if precision == "fp8":
        yield "an activation counts by the module that makes it: what a product reads is what the one before it wrote"
    if precision in {"bf16", "fp8"} and not (facts.pure and facts.own == "bf16"):
        yield from update_notes(all_updates(facts.updates))
