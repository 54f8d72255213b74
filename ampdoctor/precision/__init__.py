"""Precisions of a run and what they need: autocast policies, CUDA's names on the CPU, fp32 islands, TF32, casting."""

from __future__ import annotations

from ampdoctor.precision.casting import CastInputs, InPlaceCast, Swap, cast_model, moments, parameters_and_buffers
from ampdoctor.precision.emulation.cuda_emulation import CudaEmulation, emulate_cuda
from ampdoctor.precision.emulation.gpu.asking import heard_by
from ampdoctor.precision.emulation.gpu.lasting import lasting_emulation
from ampdoctor.precision.emulation.half_products import HalfProducts, half_products
from ampdoctor.precision.emulation.policy import AutocastPolicy, PolicyName, autocast_policy, policy_in_force
from ampdoctor.precision.emulation.tf32 import round_to_tf32, tf32
from ampdoctor.precision.emulation.torch_internals import lends_kernels, let_compile_see_hooks
from ampdoctor.precision.island import Island, island_of, island_on
from ampdoctor.precision.islands import (
    Islands,
    force_fp32,
    half_dtype,
    half_tensors,
    resolve_islands,
    widen_islands,
)
from ampdoctor.precision.masters import MasterWeights, master_weights
from ampdoctor.precision.nested import REDUCED, cast_up, map_tensors
from ampdoctor.precision.override import AutocastOverride, override_autocast, without_overrides
from ampdoctor.precision.spec import Compute, Precision
from ampdoctor.precision.widening import WideCasts, WideNumbers, as_written

__all__ = [
    "REDUCED",
    "AutocastOverride",
    "AutocastPolicy",
    "CastInputs",
    "Compute",
    "CudaEmulation",
    "HalfProducts",
    "InPlaceCast",
    "Island",
    "Islands",
    "MasterWeights",
    "PolicyName",
    "Precision",
    "Swap",
    "WideCasts",
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
