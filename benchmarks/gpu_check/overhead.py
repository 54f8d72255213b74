"""What watching costs on the device: the contenders of `benchmarks/overhead.py`, one after the other in each repeat."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import torch

from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.replay.session import Session
from benchmarks.gpu_check.section import Section
from benchmarks.overhead import BARE, LOOP, PROBED, Contest, make_run

PAIRS = ((BARE, LOOP), (PROBED, BARE), (PROBED, LOOP))


def measure(device: torch.device, repeats: int, **size: int) -> Section:
    """Time each contender's step in fp32 and fp16; nothing here can be wrong, only slow."""
    return Section(rows={precision: _ratios(precision, device, repeats, **size) for precision in ("fp32", "fp16")})


def said(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    """Yield a line for each ratio: its median, lowest and highest."""
    for precision, ratios in rows.items():
        for name, ratio in ratios.items():
            figures = f"{ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})"
            yield f"{precision}: {name} {figures}"


def _ratios(precision: str, device: torch.device, repeats: int, **size: int) -> dict[str, dict[str, float]]:
    with autocast_policy("cuda"):
        session = Session(make_run(precision=precision, **size), device=device)
        try:
            if not session.has_step(0):
                raise RuntimeError("the run has no batch")
            contest = Contest(session, peers=False)
            contest.run(repeats)
        finally:
            session.close()
    rows = {}
    for name, other in PAIRS:
        found = contest.ratios(name, other)
        rows[f"{name} / {other}"] = {"median": statistics.median(found), "lowest": found[0], "highest": found[-1]}
    return rows
