"""Opens any checkpoint inertly and streams its tensors.

Nothing in a checkpoint is ever executed. Memory is bounded whatever a file claims; a file that contradicts itself is
refused with an error.
"""
