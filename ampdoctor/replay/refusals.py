"""What torch's refusals of half tensors mean, and what to write instead.

Each row was met in training code, and a test reproduces its messages. What torch says differs from op to op; there are
few reasons behind it.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.package import FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """What torch says, and why."""

    said: str
    why: str


_HALF = "(Half|BFloat16)"
_TABLE = (
    _Refusal(
        said=rf"value cannot be converted to type \S*{_HALF} without overflow",
        why="a number in this call is beyond {largest}, and the tensor is half (autocast makes it so): write "
        "torch.finfo(x.dtype).min, with the tensor for x, or float('-inf') in place of a large constant",
    ),
    _Refusal(
        said=rf"(Index put requires|index_\w+\(\): self|masked_scatter: expected).*{_HALF}"
        r"|scatter\(\): Expected self.dtype",
        why="what is written is half, by autocast, and the tensor that it is written into is not, or the other way "
        "round: make that one with source.new_zeros(...) or dtype=source.dtype, or write source.to(target.dtype)",
    ),
    _Refusal(
        said=rf"not implemented for '{_HALF}|Low precision dtypes not supported. Got {_HALF}|Unsupported dtype {_HALF}",
        why="the op has no kernel for half on this device: run it in float32, with x.float() inside "
        "torch.autocast(device_type, enabled=False)",
    ),
    _Refusal(
        said=r"Cannot access accelerator device when none is available|FSDP needs a non-CPU accelerator",
        why="FSDP shards over GPUs, and a replay on a CPU is one process, which shards nothing: leave it out here",
    ),
    _Refusal(said=r"Got unsupported ScalarType BFloat16", why="NumPy has no bfloat16: write x.float().numpy()"),
    _Refusal(
        said=rf"(?i)(same dtype|expected scalar type|should be the same|found dtype|must be the same).*{_HALF}"
        rf"|{_HALF}.*(should be the same|must be the same|found float|but got dtype float|!= float)"
        r"|RNN input dtype \(torch.b?float16\)",
        why="one operand is half and the other float32, and autocast does not bring them together here (it is off, or "
        "does not know the op): cast one, as in x.to(layer.weight.dtype), or run both in float32",
    ),
)
_LARGEST = {False: "65504, float16's largest number", True: "3.39e38, bfloat16's largest number"}
_OURS, _TORCH = f"{FOLDER}{os.sep}", str(Path("site-packages", "torch")) + os.sep
_LONGEST = 40
"""Maximum number of characters of a call's name; of a longer one, its last part."""


def explained(error: BaseException) -> str | None:
    """Returns line, call, reason and remedy of a refusal that comes of mixed precision; None for any other error.

    Of an import, what needs a GPU and what stands in its place.

    Args:
        error: What the user's code raised.
    """
    if isinstance(error, ImportError):
        if "attempted relative import" in str(error):
            return "The file belongs to a package: name it as a module, from the folder above, as in `package.train`."
        from ampdoctor.precision.emulation.stand_ins.table import why_absent  # brings torch

        return why_absent(error)
    if not isinstance(error, RuntimeError | TypeError | ValueError):
        return None
    said = str(error)
    why = next((refusal.why for refusal in _TABLE if re.search(refusal.said, said)), None)
    if why is None:
        return None
    place = _place(error)
    return f"{f'{place}: ' if place else ''}{why.format(largest=_LARGEST['BFloat16' in said])}"


def _place(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours, and what is called there."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<")) and _TORCH not in frame.filename
    ]
    if not frames:
        return ""
    call = _call(frames[-1])
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}{f', {call}' if call else ''}"


def _call(frame: traceback.FrameSummary) -> str:
    """What is called there ("scores.masked_fill"), or the expression itself; "" where its text is not at hand."""
    if frame.lineno is None or frame.end_lineno is None or frame.colno is None or frame.end_colno is None:
        return ""
    lines = [linecache.getline(frame.filename, n).encode() for n in range(frame.lineno, frame.end_lineno + 1)]
    lines[-1] = lines[-1][: frame.end_colno]
    lines[0] = lines[0][frame.colno :]
    text = b"".join(lines).decode(errors="replace")
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return ""
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return name if len(name) <= _LONGEST else name.rpartition(".")[2][-_LONGEST:]
