"""Searches that know nothing of what they search in: no torch, no model, only positions and a question about them."""

from __future__ import annotations
