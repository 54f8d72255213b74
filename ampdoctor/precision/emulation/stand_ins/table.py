"""Which libraries need a GPU, and what stands in for them: here, or in the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ampdoctor.precision.emulation.stand_ins import apex, attention

_SDPA: Final = "scaled_dot_product_attention"
_FLASH: Final = {
    name: (_SDPA, getattr(attention, name))
    for name in (
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_kvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
    )
}
_MASK: Final = {"LowerTriangularMask": ("", attention.LowerTriangularMask)}
STAND_INS: Final[Mapping[str, Mapping[str, tuple[str, Any]]]] = {
    "flash_attn": _FLASH,
    "flash_attn.flash_attn_interface": _FLASH,
    "flash_attn.bert_padding": {
        name: ("", getattr(attention, name)) for name in ("unpad_input", "pad_input", "index_first_axis")
    },
    "xformers": {},
    "xformers.ops": {"memory_efficient_attention": (_SDPA, attention.memory_efficient_attention), **_MASK},
    "xformers.ops.fmha": {"memory_efficient_attention": (_SDPA, attention.memory_efficient_attention)},
    "xformers.ops.fmha.attn_bias": _MASK,
    "apex": {},
    "apex.optimizers": {
        "FusedAdam": ("torch.optim.AdamW", apex.FusedAdam),
        "FusedSGD": ("torch.optim.SGD", apex.FusedSGD),
    },
    "apex.normalization": {
        **dict.fromkeys(("FusedLayerNorm", "MixedFusedLayerNorm"), ("torch's layer_norm", apex.FusedLayerNorm)),
        **dict.fromkeys(("FusedRMSNorm", "MixedFusedRMSNorm"), ("torch's rms_norm", apex.FusedRMSNorm)),
    },
}
"""By module: each name that is there, what of torch's stands in for it ("": nothing worth a note), and the stand-in."""

INSTEAD: Final[Mapping[str, str]] = {
    "apex.amp": "torch.amp, which it became",
    "apex.parallel": "torch.nn.parallel.DistributedDataParallel and torch.nn.SyncBatchNorm",
    "apex": "an optimizer or layer of torch's",
    "bitsandbytes": "torch.optim.AdamW and plain linear layers",
    "causal_conv1d": "torch.nn.functional.conv1d",
    "deepspeed": "the model and its optimizer without the engine",
    "flash_attn": f"torch.nn.functional.{_SDPA} (transformers: attn_implementation='sdpa')",
    "mamba_ssm": "the model's own path without it",
    "transformer_engine": "layers of torch's under torch.autocast",
    "triton": "the same function written with torch",
    "xformers": f"torch.nn.functional.{_SDPA}, or a layer of torch's",
}
"""Libraries, and parts of them, that nothing stands in for, and what the user's code may have in their place."""


def why_absent(error: ImportError) -> str | None:
    """Returns the sentence for an import that ended the run because it needs a GPU; None for any other.

    Args:
        error: What the import raised, or what a library said of one.
    """
    missing, said = error.name or "", str(error)
    library = missing.partition(".")[0]
    named = [name for name in INSTEAD if "." not in name and name in said] if not missing else [library]
    parts = [name for name in INSTEAD if name.partition(".")[0] == library and _names_part(name, missing, said)]
    found = next((name for name in (*parts, *named) if name in INSTEAD), None)
    if found is None:
        return None
    return f"{found} needs a GPU and is not here: let the code take {INSTEAD[found]} where it is missing"


def _names_part(name: str, missing: str, said: str) -> bool:
    part = name.partition(".")[2]
    return bool(part) and (missing.startswith(name) or f"import name '{part}'" in said)
