"""An emulated GPU: CUDA's names, answered on the CPU."""
