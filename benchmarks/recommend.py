"""Is the recommendation ever worse than torch's default, and better where that is not right? Ten runs in one table.

Run: python benchmarks/recommend.py [--runs gpt12,vae] [--seeds 3] [--steps 200] [--json out.json] [--resume]

Each of the runs of `training/` is trained three times a seed by the replay engine, on the CPU with CUDA's autocast: in
fp32, in fp16 with torch's default GradScaler, and in fp16 with what `recommend` says of its first 50 steps. The same
seed means the same initial weights and the same order of the data. Where nothing is to be changed, the third training
would be the second again, and counts as such. Needs scikit-learn: pip install -e '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.training.advice import Advice, ask  # noqa: E402  # the repository is on the path only now
from benchmarks.training.arm import Trained, train  # noqa: E402
from benchmarks.training.table import Pair, comparison_table, prediction_table  # noqa: E402

FOLDER = ROOT / "benchmarks" / "training"
RUNS = {
    "gpt12": "gpt.py:make_run_12",
    "gpt36": "gpt.py:make_run_36",
    "resnet": "resnet.py:make_run",
    "vit": "vit.py:make_run",
    "seq2seq": "seq2seq.py:make_run",
    "clip": "clip.py:make_run",
    "gan": "gan.py:make_run",
    "vae": "vae.py:make_run",
    "rnn": "rnn.py:make_run",
    "half": "half.py:make_run",
}


def pair_of(name: str, seed: int, steps: int) -> dict[str, Any]:
    """All trainings of a run with a seed, as JSON values."""
    factory = f"{FOLDER}/{RUNS[name]}"
    arguments = {"seed": seed, "steps": steps, "precision": "fp16"}
    fp32 = train(factory, {**arguments, "precision": "fp32"}, compare=False)
    default = train(factory, arguments, compare=True)
    advice = ask(factory, arguments)
    recommended = default
    if advice.changes:
        precision = {"precision": advice.precision or "fp16"}
        scaler = {} if advice.scaler is None else {"scaler": advice.scaler}
        recommended = train(
            factory, {**arguments, **precision, **scaler}, fp32_modules=advice.fp32_modules, compare=True
        )
    return {
        "fp32": fp32.to_dict(),
        "default": default.to_dict(),
        "advice": advice.to_dict(),
        "recommended": recommended.to_dict(),
    }


def read_pair(seed: int, data: Mapping[str, Any]) -> Pair:
    """What `pair_of` gave."""
    trained = {key: Trained.from_dict(data[key]) for key in ("fp32", "default", "recommended")}
    return Pair(seed=seed, advice=Advice(**data["advice"]), **trained)


def measured(
    names: list[str], seeds: int, steps: int, file: Path | None, kept: dict[str, Any]
) -> Iterator[tuple[str, list[Pair]]]:
    """Run by run, written to the file after every seed; what is kept from an earlier start is not trained again."""
    for name in names:
        pairs = []
        for seed in range(seeds):
            key = f"{name} seed {seed} steps {steps}"
            if key not in kept:
                began = time.monotonic()
                kept[key] = pair_of(name, seed, steps)
                print(f"{key}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                if file is not None:
                    file.write_text(json.dumps(kept), encoding="utf-8")
            pairs.append(read_pair(seed, kept[key]))
        yield name, pairs


def main() -> int:
    """Train, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help="names, with commas between")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write every training to this file as soon as it is done")
    parser.add_argument("--resume", action="store_true", help="do not repeat what the file of --json already holds")
    options = parser.parse_args()
    names = options.runs.split(",")
    unknown = sorted(set(names) - set(RUNS))
    if unknown:
        parser.error(f"no run is called {', '.join(unknown)}; there are {', '.join(RUNS)}")
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    torch.set_num_threads(1)
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.resume and options.json.exists() else {}
    runs = list(measured(names, options.seeds, options.steps, options.json, kept))
    print(f"{options.seeds} seeds, {options.steps} steps; means over the seeds, default → recommended\n")
    print("\n".join(comparison_table(runs)))
    print("\nShare of nonzero gradients that flush to zero, from fp32's histogram / in the half-precision step\n")
    print("\n".join(prediction_table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
