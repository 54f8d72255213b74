"""Where the log of a training lies whose output has none that is read here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ampdoctor.health.reading.log_kind import Place

_HEAD = 64 * 1024
_TEXTS = frozenset({".log", ".txt", ".out", ".stdout", ".err", ".stderr"})
_MOST = 8
"""Files of a folder that are asked, the latest first."""
_LOGS: Mapping[str, re.Pattern[bytes]] = MappingProxyType(
    {
        "Lightning writes its numbers to lightning_logs/version_N/metrics.csv (CSVLogger), or to event files there": (
            re.compile(rb"v_num=|Trainer\.fit|lightning|LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES", re.IGNORECASE)
        ),
        "Ultralytics writes its numbers to runs/TASK/trainN/results.csv": re.compile(rb"Ultralytics|YOLOv\d"),
        "mmengine writes its numbers to WORK_DIR/TIMESTAMP/vis_data/scalars.json": re.compile(rb"mmengine|mmcv"),
        "the Trainer writes its numbers to checkpoint-N/trainer_state.json in its output folder": (
            re.compile(rb"train_runtime|\*{5} Running training \*{5}|transformers")
        ),
        "fairseq prints its numbers with --log-format json or simple": re.compile(rb"fairseq"),
        "DeepSpeed prints its steps with steps_per_print, and writes them with csv_monitor": (
            re.compile(rb"deepspeed", re.IGNORECASE)
        ),
        "W&B keeps the run's numbers in wandb/run-TIME-ID/run-ID.wandb": re.compile(
            rb"wandb: (?:Run data|Tracking run)"
        ),
    }
)
"""Lines that frameworks print at their start; the first match names the framework."""


def log_elsewhere(place: Place) -> str | None:
    """Returns where the framework whose output lies in a place writes its numbers, as a clause; None if it has none."""
    texts = [name for name in place.names if place.named or Path(name).suffix in _TEXTS]
    for name in place.latest(texts)[:_MOST]:
        head = place.head(name, _HEAD)
        for where, prints in _LOGS.items():
            if prints.search(head):
                return where
    return None
