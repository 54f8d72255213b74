"""Which of a model's matrix products FP8 can hold, and in which of its formats: by range, shape and place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ampdoctor.evidence.run_facts import ModuleFacts, PrecisionFacts, RowPrecision, Spread
from ampdoctor.evidence.targets import Target

E4M3_BINADES = math.log2(448.0) + 10.0
"""18.8: from E4M3's largest value down to 2^-10, up to which it rounds to zero."""
E5M2_BINADES = math.log2(57344.0) + 17.0
"""32.8: from E5M2's largest value down to 2^-17."""
NVFP4_BINADES = math.log2(6.0 / 0.25) + math.log2(448.0) + 9.0
"""22.4: E2M1 within a block of 16, and the reach of the blocks' E4M3 scales under one scale for the tensor."""
MARGIN = 1.0
"""Binades left for a largest value that grows between the step that sets the scale and the one that uses it."""
SMALLEST = 1024
"""A smaller matrix loses more time to scaling and casting than FP8 wins (torchao's filters, measured on an H100)."""
MOST = 0.5
"""Share of the products' parameters from which FP8 is a choice for the run and not for some layers."""

FORWARD = frozenset({"activation", "weight"})
BACKWARD = frozenset({"activation_grad"})

_ROUTERS = frozenset({"router", "gate", "switch", "wg"})


@dataclass(frozen=True, slots=True)
class Fp8Fit:
    """What FP8 would take over.

    Attributes:
        rows: For each module with a product of its own the precision and the reason.
        share: Of the parameters of these modules, those that FP8 takes, 0 to 1.
        nvfp4: How many of the modules lie within NVFP4's reach.
    """

    rows: Mapping[str, tuple[RowPrecision, str]] = field(default_factory=dict)
    share: float = 0.0
    nvfp4: int = 0


def fp8_fit(facts: PrecisionFacts, other: RowPrecision) -> Fp8Fit:
    """Judge each product; what FP8 does not take is computed in `other`."""
    if not facts.target.fp8:
        return Fp8Fit()
    products = [m for m in facts.modules if m.gemm_multiple_of_16 is not None]
    spreads = _by_module(facts.spreads)
    routed = {m.name for m in facts.modules if "topk" in m.ops}
    rows: dict[str, tuple[RowPrecision, str]] = {}
    for place, module in enumerate(products):
        against = _against(module, routed)
        if against is None and len(products) > 2 and place in {0, len(products) - 1}:
            which = "first" if place == 0 else "last"
            against = f"the {which} product of the model: what it rounds is read from the data or by the loss directly"
        rows[module.name] = (other, against) if against else _by_range(module.name, spreads, facts.target, other)
    weight = {m.name: m.parameters for m in products}
    taken = sum(weight[name] for name, (precision, _) in rows.items() if precision != other)
    total = sum(weight.values())
    within = [name for name in rows if _widest(spreads, name, FORWARD | BACKWARD) + MARGIN <= NVFP4_BINADES]
    return Fp8Fit(rows, taken / total if total else 0.0, len(within))


def _against(module: ModuleFacts, routed: set[str]) -> str | None:
    """Why a product is none for FP8, whatever its range."""
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


def _by_range(
    name: str, spreads: Mapping[str, Sequence[Spread]], target: Target, other: RowPrecision
) -> tuple[RowPrecision, str]:
    forward = _widest(spreads, name, FORWARD)
    backward = _widest(spreads, name, BACKWARD)
    if math.inf in {forward, backward}:
        return other, "the range of its operands was not measured"
    said = f"its forward spans {forward:.1f} binades and its gradients {backward:.1f}"
    if max(forward, backward) + MARGIN <= E4M3_BINADES:
        return "fp8 e4m3", f"{said}: E4M3 holds {E4M3_BINADES:.1f}, less {MARGIN:g} for drift"
    if forward + MARGIN <= E4M3_BINADES and backward + MARGIN <= E5M2_BINADES:
        return "fp8 hybrid", f"{said}: E4M3 holds {E4M3_BINADES:.1f} and E5M2 {E5M2_BINADES:.1f}, less {MARGIN:g} each"
    beyond = f"{said}: more than E4M3 ({E4M3_BINADES:.1f}) and E5M2 ({E5M2_BINADES:.1f}) hold under one scale"
    if target.mxfp8:
        return "mxfp8", f"{beyond}; with a scale for each 32 elements only the spread within a block counts"
    return other, f"{beyond}, and {target.name} has no MXFP8"


def _by_module(spreads: Sequence[Spread]) -> Mapping[str, list[Spread]]:
    found: defaultdict[str, list[Spread]] = defaultdict(list)
    for spread in spreads:
        found[spread.module].append(spread)
    return found


def _widest(spreads: Mapping[str, Sequence[Spread]], name: str, kinds: frozenset[str]) -> float:
    """Of the module's tensors of these kinds; inf where none was measured."""
    return max((s.binades for s in spreads.get(name, ()) if s.kind in kinds), default=math.inf)
