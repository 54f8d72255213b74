from __future__ import annotations

from hypothesis import settings

# A shared machine stalls now and then: a slow example says nothing about the code.
settings.register_profile("ampdoctor", deadline=None)
settings.load_profile("ampdoctor")
