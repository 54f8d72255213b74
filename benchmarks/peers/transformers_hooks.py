"""transformers' `DebugUnderflowOverflow(model)`: forward hooks that print the last frames and raise.

Read as an answer: the module of the last frame. A parameter that it says "has infs" or "has nans" is its op.
"""

from __future__ import annotations

import importlib
import io
import re
from contextlib import redirect_stdout

from benchmarks.peers.answer import Answer, Case

_PARAMETER = re.compile(r"^(?!input|output)(\w+) has (?:infs|nans)$", re.MULTILINE)


def debug_underflow_overflow(case: Case) -> Answer | None:
    """Train with the debugger attached."""
    loop = case.loop()
    importlib.import_module("transformers.debug_utils").DebugUnderflowOverflow(loop.model)
    said = io.StringIO()
    for step, batch in loop.batches():
        try:
            with redirect_stdout(said):
                loop.step(batch)
        except ValueError as error:
            if "DebugUnderflowOverflow: inf/nan detected" not in str(error):
                raise
            module, line = last_frame(said.getvalue(), {type(part).__name__ for part in loop.model.modules()})
            parameter = _PARAMETER.search(said.getvalue())
            return Answer(step=step, module=module, op=f"state:{parameter[1]}" if parameter else None, said=line)
    return None


def last_frame(printed: str, classes: set[str]) -> tuple[str, str]:
    """Return module and heading of the last frame: a line of the module's name and class, the root's name being ""."""
    for line in reversed(printed.splitlines()):
        words = line.split()
        if words and words[-1] in classes and len(words) <= 2:
            return "".join(words[:-1]), line.strip()
    raise ValueError("DebugUnderflowOverflow has printed no frame")
