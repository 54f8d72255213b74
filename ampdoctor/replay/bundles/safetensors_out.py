"""Writes a safetensors file tensor by tensor: nothing is held twice, and the bytes are on the disk at the end.

The library's own writer takes all tensors in host memory at once, and closes the file without a flush to the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that are written, by the format's own names."""


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, strided and of the dtypes in `CODES`, from whichever device.

    Raises:
        OSError: The disk is full, or refuses.
    """
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.numel():
                plain = tensor.detach().to("cpu").contiguous().reshape(-1)
                file.write(plain.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
