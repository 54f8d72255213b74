"""Parts of any training loop, ours or not: hooks and callbacks, names, backwards, scaler events, a step as data."""

from __future__ import annotations
