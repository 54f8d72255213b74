"""Which precision a run should have on given hardware: a decision tree over what was measured.

The order of the questions: does the forward fit fp16; does one loss scale serve the gradients; which half format is
finer there; do bf16 weights keep their updates; what do TF32 and FP8 add. Nothing here calls a format broken that is
not: where both halves do, both are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampdoctor.diagnosis.precision.fp8_fit import MOST, NVFP4_BINADES, Fp8Fit, fp8_fit
from ampdoctor.diagnosis.precision.precision_table import logit_remedies, loss_remedies, table, wide_table
from ampdoctor.diagnosis.ranges.forward_range import HEADROOM, near_limit
from ampdoctor.diagnosis.replay.optimizer_precision import all_updates, update_notes, update_remedies
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX
from ampdoctor.evidence.run_facts import (
    OVERFLOWED,
    PrecisionAdvice,
    PrecisionFacts,
    PrecisionRow,
    RowPrecision,
    RunPrecision,
)
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, ERROR_NOTE, FP32_SHARE, Thresholds

PURE_FP16 = (
    "keep the weights in fp32 and let autocast compute in fp16: a GradScaler refuses fp16 gradients, and weights and "
    "moments in fp16 lose what is small"
)
FORWARD_FLUSHED = 1e-2
"""Share of the forward's operands that may be taken for zero: 1 % is the level up to which nothing was seen to suffer,
for gradients; for activations nothing was measured."""


@dataclass(frozen=True, slots=True)
class _Fp16:
    """What fp16 takes on the target.

    Attributes:
        islands: Modules to keep in fp32, with the reason.
        share: Their share of all parameters.
        obstacle: Why it does not fit even so; None where it does.
    """

    islands: Mapping[str, str]
    share: float
    obstacle: str | None


def advise_precision(facts: PrecisionFacts, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> PrecisionAdvice:
    """The run's precision on its target, and that of each module.

    Args:
        facts: What was measured.
        thresholds: What counts as lost or too many.
    """
    fp16 = _fp16(facts, thresholds)
    precision, why, alternative = _half(facts, fp16, near=bool(_near(facts, thresholds)))
    eighth = Fp8Fit()
    rows: Iterator[PrecisionRow]
    if precision in {"fp16", "bf16"}:
        half: RowPrecision = "fp16" if precision == "fp16" else "bf16"
        eighth = fp8_fit(facts, half)
        chosen = half == "bf16" and eighth.share >= MOST
        if chosen:
            precision, alternative = "fp8", "bf16"
            why = (
                f"the products that hold {eighth.share:.0%} of the matrices' parameters fit FP8 and are large enough "
                "to gain; the rest, and all of it should the loss suffer, in BF16"
            )
        rows = table(facts, half, fp16.islands if half == "fp16" else {}, eighth.rows if chosen else {})
        remedies = [*logit_remedies(facts, half), *loss_remedies(facts)]
    else:
        wide: RowPrecision = "tf32" if precision == "tf32" else "fp32"
        mantissa = "operands read with 10 mantissa bits, sums in fp32" if wide == "tf32" else "no narrower format fits"
        rows = wide_table(facts, wide, mantissa)
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
        notes=tuple(_notes(facts, precision, eighth)),
    )


def _half(facts: PrecisionFacts, fp16: _Fp16, *, near: bool) -> tuple[RunPrecision, str, RunPrecision | None]:
    """FP16, BF16 or a wide format; why; and what is as good."""
    target = facts.target
    wide: RunPrecision = "tf32" if target.tf32 else "fp32"
    kept = f" with {_listed(fp16.islands)} ({fp16.share:.1%} of the parameters) in fp32" if fp16.islands else ""
    if fp16.obstacle is None and not target.bf16:
        return "fp16", f"FP16 fits{_at_scale(facts)}{kept}, and {target.name} has no native BF16", None
    if fp16.obstacle is None and not fp16.islands:
        both = f"FP16 and BF16 are both fine: FP16 fits{_at_scale(facts)}{_errors(facts)}"
        if facts.own == "fp16" or (facts.precision_matters and not target.bf16_backward):
            own = "and is what the run has" if facts.own == "fp16" else "and is the finer one, which was asked for"
            return "fp16", f"{both}, {own}; BF16 would need no loss scale", "bf16"
        return "bf16", f"{both}; BF16 needs no loss scale to look after", "fp16"
    gradients_only = facts.own == "fp16" and not near
    if fp16.obstacle is None and (gradients_only or facts.precision_matters):
        return "fp16", f"FP16 fits{_at_scale(facts)}{kept}; BF16 needs neither islands nor a loss scale", "bf16"
    against = fp16.obstacle or f"FP16 fits only{kept}: {next(iter(fp16.islands.values()))}"
    if target.bf16 and not facts.precision_matters:
        return "bf16", f"{against}; BF16 has the range of fp32", None
    if not target.bf16:
        return wide, f"{against}, and {target.name} has no native BF16", None
    return wide, f"{against}, and BF16's 8 bits are too few for what the run needs", "bf16"


def _fp16(facts: PrecisionFacts, thresholds: Thresholds) -> _Fp16:
    near = _near(facts, thresholds)
    islands = {name: _reach(amax, thresholds) for name, amax in near.items()}
    scale = facts.scale
    for name in scale.unserved if scale is not None else ():
        islands.setdefault(name, f"its gradients need another loss scale than the 2^{scale.exponent} of the others")  # type: ignore[union-attr]  # checked above
    return _Fp16(islands, _share(facts, islands), _obstacle(facts, islands, thresholds))


def _obstacle(facts: PrecisionFacts, islands: Mapping[str, str], thresholds: Thresholds) -> str | None:
    """Why fp16 does not fit, in a clause."""
    target, scale, share = facts.target, facts.scale, _share(facts, islands)
    if not target.fp16:
        return f"{target.name} has no native fp16"
    if share > thresholds[FP32_SHARE]:
        worst = max(_near(facts, thresholds).items(), key=lambda item: (item[1], item[0]), default=None)
        forward = f": the forward reaches {worst[1]:.5g} in {worst[0] or 'the model'}" if worst is not None else ""
        return f"FP16 would need {share:.0%} of the parameters in fp32{forward}"
    if "" in islands:
        return f"FP16 does not fit the model's own forward or its loss: {islands['']}"
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
    """Largest magnitude of each module whose outputs, or products inside it, are near fp16's limit or beyond."""
    inside = {m.name: m.product_amax for m in facts.modules if m.product_amax is not None}
    largest = {
        name: max(facts.forward.get(name, 0.0), inside.get(name, 0.0)) for name in sorted(facts.forward.keys() | inside)
    }
    return {name: amax for name, amax in largest.items() if amax >= near_limit(thresholds)}


def _reach(amax: float, thresholds: Thresholds) -> str:
    if amax >= OVERFLOWED:
        return "a product in it overflows fp16"
    binades = thresholds[HEADROOM]
    within = "a binade" if binades == 1 else f"{binades:g} binades"
    return f"its values reach {amax:.5g}, {'beyond' if amax > FP16_MAX else f'{within} or less below'} fp16's 65504"


def _share(facts: PrecisionFacts, names: Mapping[str, str]) -> float:
    """Of the parameters, those of the modules and of what is inside them: an island holds its children."""
    total = sum(m.parameters for m in facts.modules)
    inside = tuple(f"{name}." for name in names)
    held = sum(m.parameters for m in facts.modules if m.name in names or m.name.startswith(inside))
    measured = held / total if total else 0.0
    scale = facts.scale
    return max(measured, scale.share) if scale is not None and scale.unserved else measured


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


def _notes(facts: PrecisionFacts, precision: RunPrecision, eighth: Fp8Fit) -> Iterator[str]:
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
            f"FP8 would take {eighth.share:.0%} of the parameters of the matrix products; it is proposed from "
            f"{MOST:.0%} on, over BF16"
        )
    if precision == "fp8":
        yield "an activation counts by the module that makes it: what a product reads is what the one before it wrote"
        if target.nvfp4 and eighth.nvfp4:
            yield (
                f"{eighth.nvfp4} products lie within NVFP4's {NVFP4_BINADES:.1f} binades, but E2M1 has one mantissa "
                "bit: a matter of a trial, not of range"
            )
    if precision in {"bf16", "fp8"} and not (facts.pure and facts.own == "bf16"):
        yield from update_notes(all_updates(facts.updates))
