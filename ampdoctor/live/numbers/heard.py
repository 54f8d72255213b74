"""Which of the clippings that were heard are of an optimizer's gradients, and whether their norm is that of all."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ampdoctor.hooks.callbacks import Clip


@dataclass(slots=True, eq=False)
class Heard:
    """A clipping since the last step.

    Attributes:
        clip: The clipping.
        scaled: The gradients carried the loss scale then.
    """

    clip: Clip
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """What clipping knows of an optimizer's gradients.

    Attributes:
        parts: Clippings of disjoint sets of gradients, together exactly the optimizer's; the norm of their norms is
            that of all. () where there are none such.
        clipped: Some of the gradients were clipped.
        only: The one clipping there was; None where there were more or none.
    """

    parts: tuple[Heard, ...] = ()
    clipped: bool = False
    only: Heard | None = None


class Clippings:
    """Those that were heard and not yet used by a step."""

    def __init__(self) -> None:
        self._heard: list[Heard] = []

    def __bool__(self) -> bool:
        return bool(self._heard)

    def add(self, clip: Clip) -> None:
        """A clipping is about to be made."""
        self._heard.append(Heard(clip))

    def carry_scale(self, gradients: AbstractSet[int]) -> None:
        """What was clipped of these so far was still scaled."""
        for heard in self._heard:
            if heard.clip.gradients & gradients:
                heard.scaled = True

    def forget(self, gradients: AbstractSet[int] | None = None) -> None:
        """A step has used these gradients (None: all), or they are cleared: their ids may be others' from here on."""
        self._heard = [h for h in self._heard if gradients is not None and not h.clip.gradients & gradients]

    def norm_of(self, gradients: AbstractSet[int]) -> Norm:
        """Returns what is known of these gradients; of two clippings of the same the first counts."""
        mine = [heard for heard in self._heard if heard.clip.gradients & gradients]
        parts: list[Heard] = []
        covered: set[int] = set()
        exact = True
        for heard in mine:
            own = heard.clip.gradients
            if own <= covered:
                continue
            exact &= own <= gradients and not own & covered and heard.clip.norm_type in {2.0, None}
            covered |= own
            parts.append(heard)
        whole = exact and covered == set(gradients)
        return Norm(parts=tuple(parts) if whole else (), clipped=bool(mine), only=mine[0] if len(mine) == 1 else None)
