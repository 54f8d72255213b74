"""AMP911 and AMP912: an ignore of the configuration that has outlived its use; `gates` finds it."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import register

UNUSED_IGNORE = register(
    "AMP911",
    "unused-ignore",
    "An ignore of the configuration fits nothing that was found",
    worst="warning",
    commands=(),
)
EXPIRED_IGNORE = register(
    "AMP912", "expired-ignore", "An ignore of the configuration is past its date", worst="warning", commands=()
)
