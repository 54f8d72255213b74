"""Settings in the form that other frameworks take: a fragment that runs as printed, and what it cannot express."""

from __future__ import annotations

from ampdoctor.scaling.emitters.emit import emit
from ampdoctor.scaling.emitters.fragment import Emitted, Precision

__all__ = ["Emitted", "Precision", "emit"]
