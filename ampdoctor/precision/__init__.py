"""Precisions of a run and what they need: autocast policies, CUDA's names on the CPU, fp32 modules, TF32, casting."""
