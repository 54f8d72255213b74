"""What makes a process compute alike on every x86 processor.

Libraries choose their kernels by the processor, and results that differ in the last bit are, some hundred steps later,
another training. AVX2 is what every machine has that runs these tests; MKL's name for them all is "compatible".
"""

ALIKE = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
