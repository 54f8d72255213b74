"""Lightning's Trainer on a machine without a GPU, as if the one device that it asks for were there.

Lightning looks for devices itself, in the constructor of its Trainer, and trains in bf16 where fp16 is asked for on a
CPU. While a replay follows CUDA's policy, a Trainer that is made gets an accelerator that is CUDA's by name and type:
fp16 is fp16, with a GradScaler, and tensors stay where they are, as with all user code. Under the CPU's own policy a
Trainer that wants a GPU gets the CPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.entry import Original, standing_in
from ampdoctor.replay.frameworks.lightning import PACKAGES

_CONNECTOR = "trainer.connectors.accelerator_connector"
_GPUS = ("auto", "gpu", "cuda")


@contextmanager
def one_device(note: Callable[[str], None], *, pretended: bool) -> Iterator[None]:
    """While inside, a Trainer of Lightning's that is made trains on one device, which need not be there.

    Args:
        note: Told a sentence where the Trainer gets something else than it asks for.
        pretended: Is the device one of CUDA's that is not there? Else it is the CPU.
    """

    def stand_in(package: str, original: Original) -> Original:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces a method of that name
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            _settle(bound.arguments, sys.modules[package], note, pretended=pretended)
            original(*bound.args, **bound.kwargs)

        return __init__

    with ExitStack() as stack:
        for package in PACKAGES:
            module = f"{package}.{_CONNECTOR}"
            change = functools.partial(stand_in, package)
            stack.enter_context(standing_in(module, "_AcceleratorConnector", "__init__", change))
        yield


def _settle(asked: dict[str, Any], package: Any, note: Callable[[str], None], *, pretended: bool) -> None:
    """Change the arguments of a Trainer's constructor so that one process on this machine can hold them.

    Raises:
        FactoryError: They name several devices, or what is not replayed.
    """
    strategy = asked["strategy"]
    named = strategy if isinstance(strategy, str) else type(strategy).__name__
    accelerator = asked["accelerator"]
    if any(what in named.lower() for what in ("fsdp", "deepspeed", "xla", "parallel")) and "ddp" not in named.lower():
        raise FactoryError(f"Trainer(strategy={named!r}) is not replayed: give it devices=1 and no strategy")
    if accelerator in ("tpu", "mps", "hpu"):
        raise FactoryError(f"Trainer(accelerator={accelerator!r}) is not replayed: CUDA's casts or the CPU's are")
    count = _count(asked["devices"]) * asked["num_nodes"]
    if count > 1:
        raise FactoryError(
            f"the Trainer trains on {count} devices, each with its own share of the batches, "
            f"and a replay is one process: give it devices=1"
        )
    if "ddp" in named.lower():
        asked["strategy"] = "auto"
        note(f"Trainer(strategy={named!r}) with one device is replayed without it: it changes no number")
    wants_gpu = accelerator in _GPUS or isinstance(accelerator, package.accelerators.CUDAAccelerator)
    if wants_gpu:
        asked["accelerator"], asked["devices"] = _accelerator(package) if pretended else "cpu", 1


def _count(devices: Any) -> int:
    """How many devices a Trainer's argument means; "auto" and -1 mean those that are there."""
    if isinstance(devices, str):
        listed = [part for part in devices.split(",") if part.strip()]
        if len(listed) > 1 or devices.endswith(","):
            return len(listed)
        devices = int(devices) if devices.strip().isdigit() else 1
    if isinstance(devices, list | tuple):
        return len(devices)
    return max(devices, 1) if isinstance(devices, int) else 1


@functools.cache
def _accelerator_class(package: Any) -> Any:
    class CUDAAccelerator(package.accelerators.CUDAAccelerator):  # type: ignore[misc]
        """CUDA's, of which there is one that nothing is asked of."""

        def setup_device(self, device: Any) -> None:
            """Nothing has to be set."""

        def setup(self, trainer: Any) -> None:
            """Nothing has to be set."""

        def teardown(self) -> None:
            """Nothing has to be emptied."""

        def get_device_stats(self, device: Any) -> dict[str, Any]:  # noqa: ARG002 - the seam's signature
            """There are none."""
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> Any:  # noqa: ARG004 - the seam's signature
            """One."""
            return [0]

        @staticmethod
        def get_parallel_devices(devices: Any) -> Any:
            """One."""
            return [torch.device("cuda", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            """One."""
            return 1

        @staticmethod
        def is_available() -> bool:
            """It is."""
            return True

        @classmethod
        def register_accelerators(cls, accelerator_registry: Any) -> None:
            """It is in no registry."""

    return CUDAAccelerator


def _accelerator(package: Any) -> Any:
    return _accelerator_class(package)()
