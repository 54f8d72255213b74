"""ampdoctor: the doctor for mixed-precision training."""

from __future__ import annotations
