"""CUDA's autocast, half kernels and TF32 on the CPU, op by op."""
