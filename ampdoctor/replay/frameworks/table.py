"""The frameworks that are known."""

from __future__ import annotations

from typing import Final

from ampdoctor.replay.frameworks.accelerate.adapter import ACCELERATE
from ampdoctor.replay.frameworks.adapter import Adapter
from ampdoctor.replay.frameworks.lightning.adapter import LIGHTNING
from ampdoctor.replay.frameworks.trainer.adapter import TRAINER

ADAPTERS: Final[tuple[Adapter, ...]] = (TRAINER, LIGHTNING, ACCELERATE)
"""Asked in this order who claims what a factory returned."""


def adapter_of(made: object) -> Adapter | None:
    """Returns the framework that made it; None if it is none that is known."""
    return next((adapter for adapter in ADAPTERS if adapter.claims(made)), None)
