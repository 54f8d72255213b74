"""Which commands look for what a rule finds."""

from __future__ import annotations

_REPLAYING = frozenset({"bisect-nan", "recommend"})
_MEASURING = frozenset({"profile", "recommend"})
_OF_A_CHECKPOINT = frozenset({"scan"})
"""A replay judges the checkpoint that it loads as well, where it is given one: what it does not say of it, it may not
have looked at."""

_SECTIONS = {
    "AMP1": _OF_A_CHECKPOINT,
    "AMP2": _REPLAYING,
    "AMP3": _MEASURING,
    "AMP4": _OF_A_CHECKPOINT,
    "AMP5": _OF_A_CHECKPOINT,
    "AMP7": _OF_A_CHECKPOINT,
    "AMP90": _REPLAYING,
}
_APART = {
    "AMP206": _MEASURING,
    "AMP207": _MEASURING,
    "AMP405": _REPLAYING,
    "AMP406": _REPLAYING,
    "AMP407": _REPLAYING,
    "AMP411": _REPLAYING,
    "AMP501": _REPLAYING,
}
"""Rules that are not raised where the others of their section are."""


def raised_by(code: str) -> frozenset[str]:
    """Return the commands that always look for what the rule finds; none for a rule on the configuration itself."""
    found = (commands for section, commands in _SECTIONS.items() if code.startswith(section))
    return _APART[code] if code in _APART else next(found, frozenset())
