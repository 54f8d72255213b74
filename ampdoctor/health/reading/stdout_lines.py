"""What Megatron-LM and DeepSpeed print: lines of a text file into which a job's output was sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ampdoctor.checkpoints.formats.log_files import Left, as_number, lines_in
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.evidence.run_log.lines import RunLine, Stamped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place, Read, kind_of_one_file
from ampdoctor.health.reading.rows import Row, lines_of

_SUFFIXES = frozenset({".log", ".txt", ".out", ".stdout", ".err", ".stderr"})
_HEAD = 8 * 1024 * 1024
"""Bytes in which the first line of a step stands: before it a job prints its arguments and compiles."""

_ITERATION = re.compile(rb"\biteration\s+(\d{1,16})/\s*\d+\s*\|(.*)")
_MEGATRON = {
    "consumed samples": "samples",
    "consumed tokens": "tokens",
    "learning rate": "learning_rate",
    "lm loss": "loss",
    "loss": "loss",
    "loss scale": "loss_scale",
    "grad norm": "gradient_norm",
    "elapsed time per iteration (ms)": "milliseconds",
    "elapsed time per iteration (s)": "seconds",
    "number of skipped iterations": "skips",
    "number of nan iterations": "nans",
}

_STEP = re.compile(rb"\[Rank 0\] step=(\d{1,16}), skipped=(\d+)(?:, lr=\[\[?([^,\]]+))?")
_OVERFLOW = re.compile(
    rb"(?:OVERFLOW! Rank 0|\[Rank 0\] Overflow detected\.) Skipping step\. Attempted loss scale: ([0-9.e+]+),"
    rb"(?: reducing to ([0-9.e+]+))?"
)


def _megatron_rows(lines: Iterator[bytes]) -> Iterator[Row]:
    """Yields the rows of Megatron-LM's lines, each the mean over the iterations since the one before it.

    Megatron-LM leaves a loss that is not finite out of the mean. Only where a line is one iteration, which iteration
    was skipped or had no finite loss is known; a line of iteration 1 is one.
    """
    before = 0
    for line in lines:
        found = _ITERATION.search(line)
        if found is None:
            continue
        step, values = int(found[1]), {}
        for part in found[2].decode("utf-8", "replace").split("|"):
            key, _, value = part.rpartition(":")
            field, number = _MEGATRON.get(key.strip()), as_number(value.strip())
            if field is not None and number is not None:
                values[field] = number
        if "milliseconds" in values:
            values["seconds"] = values.pop("milliseconds") / 1000
        skips, nans = values.pop("skips", None), values.pop("nans", 0.0)
        single = step in {1, before + 1}
        if skips == 0 or (single and skips is not None):
            values["skipped"] = float(skips > 0)
        if single and nans:
            values["loss"] = float("nan")
        before = step
        yield Row(step, values)


def _deepspeed_rows(lines: Iterator[bytes]) -> Iterator[Row]:
    """Yields the rows of DeepSpeed's lines.

    An overflow is printed without its step: those since the last line of a step are put right behind that step.
    """
    step, scale = 0, None
    for line in lines:
        overflow = _OVERFLOW.search(line)
        if overflow is not None:
            attempted = as_number(overflow[1].decode())
            step += 1
            if attempted is not None:
                yield Row(step, {"loss_scale": attempted, "skipped": 1.0})
            scale = as_number((overflow[2] or overflow[1]).decode())
            continue
        found = _STEP.search(line)
        if found is None:
            continue
        rate = as_number((found[3] or b"").decode("utf-8", "replace"))
        values = {} if rate is None else {"learning_rate": rate}
        known = {} if scale is None else {"loss_scale": scale}
        if step != int(found[1]):  # else the last of the overflows was this step's
            values |= {**known, "skipped": 0.0}
        step = int(found[1])
        yield Row(step, values)


def _logs_of(place: Place, *, pattern: re.Pattern[bytes]) -> list[str]:
    likely = [name for name in place.names if place.named or Path(name).suffix in _SUFFIXES]
    return [name for name in likely if pattern.search(place.head(name, _HEAD))]


def _reading(rows: Callable[[Iterator[bytes]], Iterator[Row]], pattern: re.Pattern[bytes]) -> Read:
    def read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
        (name,) = names
        left = Left()
        with RegularFile(folder / name, name) as file:
            yield from lines_of(rows(lines_in(file, left=left)), RunLine(name=Path(name).stem), noticed.order)
        if pattern.search(left.unfinished):  # else it is no step, nor does a line too long matter here
            noticed.left[name].unfinished = left.unfinished

    return read


def _kind(name: str, rows: Callable[[Iterator[bytes]], Iterator[Row]], pattern: re.Pattern[bytes]) -> LogKind:
    return kind_of_one_file(name, partial(_logs_of, pattern=pattern), _reading(rows, pattern))


MEGATRON = _kind("megatron", _megatron_rows, _ITERATION)
DEEPSPEED = _kind("deepspeed", _deepspeed_rows, _STEP)
