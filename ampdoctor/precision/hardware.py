"""What torch computes on, and how."""

from __future__ import annotations

from typing import Any

import torch

from ampdoctor.precision.shims import torch_shims


def torch_facts() -> dict[str, Any]:
    """The build of torch, its threads, and what stands in for something that it lacks."""
    return {
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_shims": [f"{name}: {sentence}" for name, sentence in torch_shims().items()],
    }


def device_facts() -> dict[str, Any]:
    """The GPUs. Where nothing has yet, asking begins to use CUDA, and a forked process can then use it no more."""
    if not torch.cuda.is_available():
        return {"cuda_available": False}
    return {
        "cuda_available": True,
        "cudnn": torch.backends.cudnn.version(),
        "devices": [
            "{0}, compute capability {1[0]}.{1[1]}".format(
                torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            )
            for index in range(torch.cuda.device_count())
        ],
    }
