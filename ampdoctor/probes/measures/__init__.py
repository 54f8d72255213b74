"""Figures by module: ranges, gradients, updates, attention."""
