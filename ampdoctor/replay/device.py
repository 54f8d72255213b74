"""The device of a replay."""

from __future__ import annotations

import torch

from ampdoctor.errors import ReplayError


def choose_device(name: str) -> torch.device:
    """Returns the device that `--device` names.

    Raises:
        ReplayError: The machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ReplayError(f"--device {name!r} is not auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ReplayError(f"--device {name!r} is not auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ReplayError(
                f"--device {name}: this machine has {count} CUDA devices; --device cpu emulates CUDA's casts"
            )
    return device
