"""Settings as other people's frameworks take them: a fragment that runs as printed, and what it cannot say."""

from __future__ import annotations

from ampdoctor.scaling.emitters.emit import emit
from ampdoctor.scaling.emitters.fragment import Emitted, Precision

__all__ = ["Emitted", "Precision", "emit"]
