"""numpy, imported on first use: a watched script imports the catalogue of rules, which does not need numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            import numpy as np

            found = self.__dict__[name] = getattr(np, name)  # the next time it is there
            return found

    np = _Later()
