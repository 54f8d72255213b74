"""The GPU that is emulated: what it says of itself, and of its memory, which is the process's own."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

with contextlib.suppress(ImportError):  # Windows has none
    import resource


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns; the names are CUDA's."""

    name: str = "NVIDIA A100-SXM4-80GB"
    major: int = 8
    minor: int = 0
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 108
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 * 2**10
    shared_memory_per_block_optin: int = 163 * 2**10
    shared_memory_per_multiprocessor: int = 164 * 2**10
    warp_size: int = 32
    L2_cache_size: int = 40 * 2**20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    uuid: str = "00000000-0000-0000-0000-000000000000"


CARD: Final = DeviceProperties()
CAPABILITY: Final = (CARD.major, CARD.minor)
CUDA_VERSION: Final = "12.8"
"""Of the CUDA that torch says it was built with."""
CUDNN_VERSION: Final = 91002
DESCRIBED: Final = f"an A100-like device, compute capability {CARD.major}.{CARD.minor}"
_STATISTICS: Final = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_COUNTERS: Final = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")


def memory_used() -> int:
    """Returns the most bytes of memory that the process has held: on a CPU tensors lie there."""
    if "resource" not in globals():
        return 1
    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kept if sys.platform == "darwin" else kept * 1024


def memory_info() -> tuple[int, int]:
    """Returns the free and the total bytes of the device."""
    return max(CARD.total_memory - memory_used(), 0), CARD.total_memory


def memory_statistics() -> OrderedDict[str, Any]:
    """Returns what `torch.cuda.memory_stats` returns, by its names."""
    used = memory_used()
    held = {"allocated_bytes": used, "reserved_bytes": used, "active_bytes": used, "requested_bytes": used}
    found: OrderedDict[str, Any] = OrderedDict()
    for statistic in _STATISTICS:
        for pool in ("all", "large_pool", "small_pool"):
            for moment in ("current", "peak", "allocated", "freed"):
                found[f"{statistic}.{pool}.{moment}"] = 0 if moment == "freed" else held.get(statistic, 0)
    return found | dict.fromkeys(_COUNTERS, 0)


def memory_summary() -> str:
    """Returns in one line what `torch.cuda.memory_summary` draws a table of."""
    return f"no GPU here: the process's own memory, at most {memory_used()} bytes"
