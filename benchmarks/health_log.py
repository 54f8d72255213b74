"""How long `health` takes for a long run: `python benchmarks/health_log.py [--steps N] [--every N] [--tensors N]`.

Writes a log as a watched training writes it, in files of 16 MB, and prints for a look at it: seconds, the most memory
that the process had, and what parsing the same bytes alone takes (`json.loads`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ampdoctor.evidence.log_records import DetailLine, EndLine, Line, LogRecord, RunLine, Stamp, StepLine, TensorDetail
from ampdoctor.evidence.log_text import text_of

SEGMENT = 16 * 1024 * 1024
LOOK = """
import json, resource, sys, time
began = time.perf_counter()
from ampdoctor.workflows.health import health
report = health([sys.argv[1]])
print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  len(report.findings), report.health.runs[0].steps]))
"""


def write_log(folder: Path, *, steps: int, every: int, tensors: int, seed: int = 0) -> int:
    """Writes the log, and returns its size in bytes."""
    draw = random.Random(seed)
    names = tuple(f"transformer.h.{at // 12}.part{at % 12}.weight" for at in range(tensors))
    header = RunLine(
        name="long", tensors=names, optimizers=("AdamW",), scalers=("scaler",), precision="fp16", detail_every=every
    )
    stamp = {"run_id": "5c1f0e6bd2f7a390"}
    size, total, segment, scale, time_ms = 0, 0, 1, 65536.0, 1_795_433_197_163
    file = (folder / "log.1.jsonl").open("w")

    def put(line: Line) -> None:
        nonlocal size, total, segment, file
        text = text_of(LogRecord(Stamp(**stamp, time_ms=time_ms), line))
        if size + len(text) > SEGMENT:
            file.close()
            segment, size = segment + 1, 0
            file = (folder / f"log.{segment}.jsonl").open("w")
            put(header)
        file.write(text)
        size, total = size + len(text), total + len(text)

    put(header)
    for step in range(steps):
        time_ms += 310
        skipped = step % 2000 == 1999
        loss = 2.0 + 8.0 / (1 + step / 2000) + draw.gauss(0, 0.05)
        put(
            StepLine(
                step=step,
                accepted=step,
                micro_steps=1,
                scaler=0,
                loss=loss,
                gradient_norm=0.5 * 2 ** draw.gauss(0, 0.15),
                max_norm=1.0,
                loss_scale=scale,
                skipped=skipped,
                learning_rates=(3e-4,),
                seconds=0.31,
                tokens=step * 4096,
            )
        )
        if step % every == 0:
            put(
                DetailLine(
                    step=step,
                    loss_scale=scale,
                    tensors=tuple(
                        TensorDetail(
                            tensor=at,
                            role="gradient",
                            format="fp16",
                            elements=1_048_576,
                            norm=0.05 * 2 ** draw.gauss(0, 0.1),
                            amax=0.001 * 2 ** draw.gauss(0, 0.1),
                            nonfinite=0,
                            zero_share=0.004 + draw.random() / 1000,
                            flushed_share=0.004 + draw.random() / 1000,
                            log2_headroom=6 + draw.random() / 10,
                        )
                        for at in range(tensors)
                    ),
                )
            )
    put(EndLine(exit_code=0, steps=steps))
    file.close()
    (folder / f"log.{segment}.jsonl").rename(folder / "log.jsonl")
    return total


def parse(folder: Path) -> float:
    """Returns the seconds that `json.loads` alone takes for every line."""
    began = time.perf_counter()
    for path in folder.glob("log*.jsonl"):
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
    return time.perf_counter() - began


def main() -> None:
    """Writes, looks, and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--tensors", type=int, default=150)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "long"
        log.mkdir()
        size = write_log(log, steps=asked.steps, every=asked.every, tensors=asked.tensors)
        print(f"{size / 1e6:.0f} MB; json.loads alone {parse(log):.1f} s")
        done = subprocess.run([sys.executable, "-c", LOOK, str(log)], capture_output=True, text=True, check=True)
        seconds, memory, findings, steps = json.loads(done.stdout)
        print(f"a look: {seconds:.1f} s, {memory:.0f} MB, {steps} steps, {findings} findings")


if __name__ == "__main__":
    main()
