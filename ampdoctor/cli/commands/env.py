"""`ampdoctor env`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Annotated, Any

import typer

from ampdoctor.cli.options.options import ListFormat
from ampdoctor.cli.process.action import Action
from ampdoctor.cli.process.exit_code import Outcome
from ampdoctor.cli.process.streams import report_stream, write_stdout
from ampdoctor.errors import EXIT_OK
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


def env(form: Annotated[ListFormat, typer.Option("--format", help="Form of the list.")] = "human") -> Action:
    """List what to paste into a bug report.

    Versions, devices, and the settings that change numbers; nothing else of the environment is shown.
    """

    def action() -> Outcome:
        facts = {**_software(), **_torch(), **_environment()}
        if form == "json":
            from ampdoctor.reports.forms.to_json import strict_json

            write_stdout(strict_json(facts))
        else:
            from ampdoctor.reports.words.sanitise import sanitise

            write_stdout("".join(f"{name}: {sanitise(_shown(fact))}\n" for name, fact in facts.items()))
        return Outcome(EXIT_OK)

    return action


def versions() -> str:
    """Return one line with the versions of the tool, torch and Python, without importing torch."""
    torch = _version("torch") or "not installed"
    return f"ampdoctor {version()} (torch {torch}, Python {platform.python_version()})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _software() -> dict[str, Any]:
    return {
        "ampdoctor": version(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "stdout_encoding": getattr(report_stream(), "encoding", None),
        **{package: _version(package) for package in _PACKAGES},
    }


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a torch that cannot be loaded is what this page is for
        return {"torch_import": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {
        "torch_import": "ok",
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda_available": torch.cuda.is_available(),
        "torch_shims": _shims(),
    }
    if torch.cuda.is_available():
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["devices"] = [
            "{0}, compute capability {1[0]}.{1[1]}".format(
                torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            )
            for index in range(torch.cuda.device_count())
        ]
    return facts


def _shims() -> list[str]:
    from ampdoctor.precision.shims import torch_shims

    return [f"{name}: {sentence}" for name, sentence in torch_shims().items()]


def _environment() -> dict[str, Any]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _shown(fact: Any) -> str:
    if fact is None:
        return "none"
    return "; ".join(fact) or "none" if isinstance(fact, list) else str(fact)
