"""Versions of installed packages and variables of the environment that affect numbers, without importing packages."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from ampdoctor.package import version

_PACKAGES = ("torch", "numpy", "safetensors", "typer", "rich", "transformers", "accelerate", "lightning", "deepspeed")
_VARIABLES = (  # those that change numbers or devices; no other variable is shown
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, str]:
    """Versions of ampdoctor and Python, and the platform."""
    return {
        "ampdoctor": version(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
    }


def packages() -> dict[str, str | None]:
    """Versions of the packages that a training uses; None if not installed."""
    return {package: installed(package) for package in _PACKAGES}


def variables() -> dict[str, str]:
    """The variables of the environment that are set and change numbers or devices."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}
