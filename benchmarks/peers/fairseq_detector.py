"""fairseq's `NanDetector(model)`: hooks in forward and backward that log the first bad output of a module.

Read as an answer: the first line that it logs. It is one file, so only that file is installed, as
`fairseq_nan_detector`.
"""

from __future__ import annotations

import importlib
import logging
import re

from benchmarks.peers.answer import Answer, Case

_LINE = re.compile(r"(?:NaN|Inf) detected in output of (.*?), shape")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def nan_detector(case: Case) -> Answer | None:
    """Train with the detector around each step."""
    module = importlib.import_module("fairseq_nan_detector")
    heard = _Lines()
    module.logger.addHandler(heard)
    loop = case.loop()
    for step, batch in loop.batches():
        with module.NanDetector(loop.model):
            loop.step(batch)
        for line in heard.lines:
            found = _LINE.search(line)
            if found:
                return Answer(step=step, module=found[1], said=line)
    return None
