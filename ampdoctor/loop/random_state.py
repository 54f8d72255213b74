"""The states of the random generators that training code draws from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every random generator that training code commonly draws from."""

    python: Any
    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    numpy: Any
    own: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def capture(cls, generators: tuple[torch.Generator, ...] = (), like: RandomState | None = None) -> RandomState:
        """Copy the current states of Python's, torch's (CPU and each CUDA device) and numpy's global generators.

        CUDA is not begun for it: without a context, its generators are as their seed makes them.

        Args:
            generators: Generators of the user's own (a DataLoader's); their states are kept as well.
            like: An earlier state; equal parts are shared with it, because 30 kB a step add up over a long run.
        """
        import numpy as np

        # asking for a state begins CUDA: memory of a GPU that the loop does not use, and none for what it forks
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        python, cpu = random.getstate(), torch.get_rng_state()
        numpy = np.random.get_state()  # noqa: NPY002 - the global one is what user code draws from
        if like is not None:
            python = like.python if like.python == python else python
            cpu = like.torch_cpu if torch.equal(like.torch_cpu, cpu) else cpu
            numpy = like.numpy if _same_numpy(like.numpy, numpy) else numpy
        return cls(python, cpu, cuda, numpy, tuple((own, own.get_state()) for own in generators))

    def restore(self) -> None:
        """Restore the generators' states."""
        import numpy as np

        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))
        elif torch.cuda.is_initialized():  # begun since: as it begins, with the seed that the CPU has been given
            torch.cuda.manual_seed_all(torch.initial_seed())
        np.random.set_state(self.numpy)  # noqa: NPY002 - see capture
        for own, state in self.own:
            own.set_state(state)


def _same_numpy(here: Any, there: Any) -> bool:
    """Are two states of numpy's global generator equal: its name, its words, and three numbers?"""
    import numpy as np

    return all(
        np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        for mine, theirs in zip(here, there, strict=True)
    )
