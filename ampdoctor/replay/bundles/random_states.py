"""The generators' states of a program, as tensors; a state that several instructions begin from is kept once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.process_state import RandomState

_PYTHON = 625
_NUMPY = 624


class StatesOut:
    """Collects states.

    Attributes:
        entries: For the manifest.
        tensors: For the file, by name.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._names: dict[bytes, str] = {}

    def index_of(self, state: RandomState) -> int:
        """Returns the index of a state's entry."""
        import numpy as np

        version, words, gauss = state.python
        kind, numbers, *rest = state.numpy
        python = self._kept(torch.tensor(words, dtype=torch.int64))
        numpy = self._kept(torch.from_numpy(np.asarray(numbers).astype(np.int64)))
        cpu = self._kept(state.torch_cpu)
        cuda = tuple(self._kept(one) for one in state.torch_cuda)
        key = version, python, gauss, kind, numpy, tuple(rest), cpu, cuda
        if key not in self._known:
            self._known[key] = len(self.entries)
            self.entries.append(
                {
                    "python": {"version": version, "words": python, "gauss": gauss},
                    "numpy": {"kind": kind, "words": numpy, "rest": [int(rest[0]), int(rest[1]), float(rest[2])]},
                    "torch": cpu,
                    "cuda": list(cuda),
                }
            )
        return self._known[key]

    def _kept(self, tensor: torch.Tensor) -> str:
        content = bytes(tensor.numpy().tobytes())
        name = self._names.setdefault(content, f"random/{len(self._names)}")
        self.tensors.setdefault(name, tensor)
        return name


def states_in(entries: Any, tensors: Mapping[str, torch.Tensor], name: str) -> list[RandomState]:
    """Returns the states of a manifest; those of CUDA's generators only where this machine has as many.

    Raises:
        CheckpointError: An entry is malformed.
    """
    try:
        return [_state(entry, tensors) for entry in entries]
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{name}: a random state is malformed ({type(error).__name__}).") from None


def _state(entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> RandomState:
    import numpy as np

    python, numpy = entry["python"], entry["numpy"]
    words, numbers, cpu = tensors[python["words"]], tensors[numpy["words"]], tensors[entry["torch"]]
    cuda = tuple(tensors[one] for one in entry["cuda"])
    if words.shape != (_PYTHON,) or numbers.shape != (_NUMPY,) or python["version"] != 3 or numpy["kind"] != "MT19937":
        raise ValueError("generator")
    if not 0 <= int(words[-1]) <= _PYTHON - 1 or not 0 <= numpy["rest"][0] <= _NUMPY or int(words.min()) < 0:
        raise ValueError("place")
    if cpu.dtype is not torch.uint8 or cpu.shape != torch.get_rng_state().shape:
        raise ValueError("torch")
    gauss = python["gauss"]
    usable = torch.cuda.is_available() and torch.cuda.device_count() == len(cuda)
    return RandomState(
        python=(3, tuple(int(word) for word in words), gauss if gauss is None else float(gauss)),
        torch_cpu=cpu,
        torch_cuda=cuda if usable else (),
        numpy=("MT19937", numbers.numpy().astype(np.uint32), *(numpy["rest"])),
    )
