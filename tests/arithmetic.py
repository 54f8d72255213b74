"""What makes a process compute alike on every x86 processor: a training is followed by others of its kind only so.

Libraries choose their kernels by the processor; results that differ in the last bit are, hundreds of steps later, another
training. AVX2 is what every machine has that runs these tests; MKL's own name for all of them is "compatible".
"""

ALIKE = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
}
