"""Hooks on tensors and modules of a loop that is somebody else's."""
