"""A GPU's truth beside the emulation on the CPU, in one command.

Run: python benchmarks/gpu_check [--part PART ...] [--device cuda:0] [--out FOLDER] [--quick]

ops         the output dtype of each op under CUDA's autocast
cases       origin and cause of the corpus's runs
products    what half products and attention give
histograms  histograms and the non-finite check, bit for bit
syncs       watching a step does not wait for the device
overhead    what watching costs, as ratios

The answers go to fixtures/golden/DEVICE-TORCH.json, to which the tests hold the emulation. `--device cpu` is a
rehearsal without a GPU: what stands in for one is said in the file of each part, and nothing is written without
`--out`. The exit code is 1 where the device and the CPU disagree, 2 where there is no such device or a part failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # the folder itself would hide other modules behind the names of its files

import torch  # noqa: E402  # only now is the path right

from ampdoctor.errors import AmpdoctorError, UsageError  # noqa: E402
from ampdoctor.replay.parts import choose_device  # noqa: E402
from benchmarks.gpu_check import cases, golden, histograms, ops, overhead, products, syncs  # noqa: E402
from benchmarks.gpu_check.section import Section  # noqa: E402
from fixtures.corpus import runs  # noqa: E402

DIAGNOSED = sorted(set(runs.case_ids()) - runs.not_found_yet())
FEW = ("box_coder_log_eps", "clip_before_unscale", "healthy_dead_relu_zero_grads", "scaler_state_zero_checkpoint")
SMALL = {"blocks": 1, "width": 64, "batch": 1, "context": 8, "vocabulary": 16}
PARTS: dict[str, tuple[Callable[[torch.device], Section], Callable[[torch.device], Section]]] = {
    "ops": (ops.measure, ops.measure),
    "cases": (lambda device: cases.measure(device, DIAGNOSED), lambda device: cases.measure(device, FEW)),
    "products": (products.measure, products.measure),
    "histograms": (histograms.measure, lambda device: histograms.measure(device, large=False)),
    "syncs": (syncs.measure, lambda device: syncs.measure(device, **SMALL)),
    "overhead": (lambda device: overhead.measure(device, 15), lambda device: overhead.measure(device, 2, **SMALL)),
}
"""Each part in full, and quick."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the device, print what it said, and write the golden file."""
    options = _parser().parse_args(arguments)
    try:
        device = _device(options.device)
        folder = options.out or (golden.FOLDER if device.type == "cuda" and not options.quick else None)
    except AmpdoctorError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    print(f"{_name(device)}, torch {torch.__version__}")
    return max(_answer(part, device, folder, quick=options.quick) for part in options.part or PARTS)


def _answer(part: str, device: torch.device, folder: Path | None, *, quick: bool) -> int:
    """Run a part, and say and write at once what it found: a part that fails costs no other.

    Returns:
        The exit code: 0, 1 where the device disagrees, 2 where the part failed.
    """
    start = time.monotonic()
    try:
        section = PARTS[part][quick](device)
    except Exception:  # noqa: BLE001 - whatever a device can do to us
        traceback.print_exc()
        print(f"{part}: failed", flush=True)
        return 2
    print(
        f"{part}: {len(section.rows)} asked, {len(section.differences)} differ ({time.monotonic() - start:.0f} s)",
        *(f"  not asked: {line}" for line in section.skipped),
        *(f"  differs: {line}" for line in section.differences),
        *(f"  {line}" for line in (overhead.said(section.rows) if part == "overhead" else ())),
        sep="\n",
        flush=True,
    )
    if folder is not None:
        found = golden.Golden(device=_name(device), torch=torch.__version__, sections={part: section.rows})
        print(f"  written: {golden.write(found, folder)}", flush=True)
    return int(bool(section.differences))


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"torch {torch.__version__} finds no CUDA device here; --device cpu rehearses the check without one"
        )
    return choose_device(name)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="this one alone; may be repeated")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the golden file goes")
    parser.add_argument("--quick", action="store_true", help="small sizes, few cases: does everything still run?")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)  # ratios of CPU seconds: see benchmarks/overhead.py
    sys.exit(main())
