"""numpy, imported when it is first used: who reads the catalogue of rules alone, as a watched script does, needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            import numpy as np

            return getattr(np, name)

    np = _Later()
