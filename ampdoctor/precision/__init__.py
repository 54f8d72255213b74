"""Precisions of a run and what they need: autocast policies, CUDA's names on the CPU, fp32 islands, TF32, casting."""

from __future__ import annotations

from ampdoctor.precision.casting import (
    REDUCED,
    CastInputs,
    InPlaceCast,
    MasterWeights,
    TemporaryCast,
    cast_model,
    cast_up,
    map_tensors,
    master_weights,
    moments,
    parameters_and_buffers,
)
from ampdoctor.precision.cuda_autocast import AutocastPolicy, PolicyName, autocast_policy, policy_in_force
from ampdoctor.precision.dtype_overrides import (
    AutocastOverride,
    UpcastHalf,
    WideNumbers,
    as_written,
    override_autocast,
    without_overrides,
)
from ampdoctor.precision.fake_gpu.emulate import CudaEmulation, emulate_cuda
from ampdoctor.precision.fake_gpu.processes import lasting_emulation
from ampdoctor.precision.fake_gpu.replace import heard_by
from ampdoctor.precision.fp16_matmul import HalfProducts, half_products
from ampdoctor.precision.fp32_modules import (
    Fp32Module,
    Fp32Modules,
    force_fp32,
    half_dtype,
    half_tensors,
    island_of,
    island_on,
    resolve_islands,
    widen_islands,
)
from ampdoctor.precision.kernels import lends_kernels, let_compile_see_hooks
from ampdoctor.precision.spec import Compute, Precision
from ampdoctor.precision.tf32 import round_to_tf32, tf32

__all__ = [
    "REDUCED",
    "AutocastOverride",
    "AutocastPolicy",
    "CastInputs",
    "Compute",
    "CudaEmulation",
    "Fp32Module",
    "Fp32Modules",
    "HalfProducts",
    "InPlaceCast",
    "MasterWeights",
    "PolicyName",
    "Precision",
    "TemporaryCast",
    "UpcastHalf",
    "WideNumbers",
    "as_written",
    "autocast_policy",
    "cast_model",
    "cast_up",
    "emulate_cuda",
    "force_fp32",
    "half_dtype",
    "half_products",
    "half_tensors",
    "heard_by",
    "island_of",
    "island_on",
    "lasting_emulation",
    "lends_kernels",
    "let_compile_see_hooks",
    "map_tensors",
    "master_weights",
    "moments",
    "override_autocast",
    "parameters_and_buffers",
    "policy_in_force",
    "resolve_islands",
    "round_to_tf32",
    "tf32",
    "widen_islands",
    "without_overrides",
]
