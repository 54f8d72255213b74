"""Renderers: a report as strict JSON, and for people."""
