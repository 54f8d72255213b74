"""Causes and rules: pure functions of evidence, without torch, and the catalogue that explains each rule."""
