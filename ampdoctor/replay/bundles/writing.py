"""`write_bundle`: a recorded step as a folder, whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal

import torch

from ampdoctor.errors import OutputError
from ampdoctor.hooks.json_values import class_name, written
from ampdoctor.hooks.program import Leading, Program
from ampdoctor.package import version
from ampdoctor.replay.bundles.collecting import Collected, bytes_of, shown
from ampdoctor.replay.bundles.describing import Made
from ampdoctor.replay.bundles.manifest import CALLS, LED_UP, LOG, MANIFEST, SCHEMA, STATE
from ampdoctor.replay.bundles.safetensors_out import write_safetensors
from ampdoctor.replay.recorded.inner_autocast import with_inner_autocast

_PACKAGES = ("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A bundle that was written.

    Attributes:
        folder: Where it is.
        size: Bytes of its files.
        left_out: What it lacks, in sentences.
        replays: Whether the step can be run again from it.
        code: What `--model` has to name for its model to be made again; None where it takes no code.
        from_checkpoint: Its weights are to come from a checkpoint.
    """

    folder: Path
    size: int
    left_out: tuple[str, ...]
    replays: bool
    code: str | None = None
    from_checkpoint: bool = False


def write_bundle(
    folder: Path,
    program: Program,
    *,
    made: Made = lambda _module: None,
    rank: int = 0,
    world: int = 1,
    policy: Literal["cuda", "native"] | None = None,
    weights_before: bool = True,
    leading: Leading | None = None,
    scaler_state: Mapping[str, Any] | None = None,
    diagnosis: Mapping[str, Any] | None = None,
    log: Sequence[str] = (),
    max_bytes: int = 4_000_000_000,
) -> Written:
    """Write a recorded step.

    It waits for a GPU, and copies tensors from it one by one; nothing of the training is changed.

    Args:
        folder: The bundle's own folder; it must not exist.
        program: The step.
        made: As in `Made`.
        rank: The process.
        world: Number of processes.
        policy: The autocast that it replays under on a CPU; None: CUDA's if a tensor lay on a GPU, else the CPU's own.
        weights_before: Whether the weights are still those that the step began with.
        leading: What leads up to the step, whose weights and optimizer's state are known no more and are left out.
        scaler_state: The scaler's `state_dict`; None: as it is now.
        diagnosis: What was found in place; strict JSON.
        log: The log's last lines, without their ends.
        max_bytes: The bundle's size at most. The optimizer's state is left out first, then the parameters.

    Raises:
        OutputError: The calls alone are larger than `max_bytes`, or the disk is full, or refuses; nothing is left then.
    """
    collected = Collected(with_inner_autocast(program), made)
    left_out = collected.fit(max_bytes) if leading is None else collected.lead(leading, max_bytes)
    manifest = {
        "schema": LED_UP if collected.earlier else SCHEMA,
        "ampdoctor": version(),
        "versions": _versions(),
        "step": program.step,
        "rank": rank,
        "world": world,
        "policy": policy or collected.own_policy(),
        "weights": ("before the step" if weights_before else "after the step") if collected.has_weights else "left out",
        "scaler": _scaler(program.scaler, scaler_state),
        **({} if leading is None else {"updates": leading.made}),
        **({"earlier": [step.said for step in collected.earlier]} if collected.earlier else {}),
        **collected.manifest(),
        "left_out": list(left_out),
        "diagnosis": None if diagnosis is None else dict(diagnosis),
    }
    manifest["exact"] = _exact(manifest, collected)
    text = json.dumps(manifest, allow_nan=False, indent=1)
    size = _write_whole(folder, collected, text, log)
    return Written(
        folder=folder,
        size=size,
        left_out=left_out,
        replays=not collected.cannot,
        code=collected.code(),
        from_checkpoint=not collected.has_weights,
    )


def _scaler(scaler: Any, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if scaler is None or not hasattr(scaler, "state_dict"):
        return None
    held = scaler.state_dict() if state is None else state
    numbers = {str(key): value for key, value in held.items() if type(value) in (int, float, bool)}
    return {"class": class_name(type(scaler)), "state": {key: written(value) for key, value in numbers.items()}}


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version_of(name)
    return found


def _exact(manifest: Mapping[str, Any], collected: Collected) -> dict[str, list[str]]:
    """What is as it was, and what is not, in sentences."""
    yes = ["what entered the models, buffers, autocast and the order of calls and backwards"]
    no = list(manifest["unexplained"])
    if "updates" in manifest and (manifest["scaler"] or {}).get("state"):
        no.append("the loss scale is the one behind the step")
    if collected.earlier:
        doubts = Counter(doubt for step in collected.earlier for doubt in step.doubts)
        no += [
            f"of {count} of the {len(collected.earlier)} updates before it: {doubt}" for doubt, count in doubts.items()
        ]
        if manifest["world"] > 1:
            no.append(
                "the recorded updates are of this rank's gradients alone: the weights that they lead to are others"
            )
        no.append(
            "the weights are made again by the recorded updates since the checkpoint: exact where the machine, its "
            "kernels and the updates are those of the training, and near them elsewhere"
        )
    if manifest["weights"] == "before the step":
        yes.append("the weights, which are those before the step")
    elif manifest["weights"] == "after the step":
        no.append("the weights are those after the step: where it changed them, the replay may say otherwise")
    if collected.draws_on_gpu():
        no.append("random numbers that a GPU drew (dropout) are other ones on a machine without it")
    else:
        yes.append("random numbers")
    return {"yes": yes, "no": no}


def _write_whole(folder: Path, collected: Collected, manifest: str, log: Sequence[str]) -> int:
    if folder.exists():
        raise OutputError(f"{folder} exists: a bundle is never written over anything")
    beside = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        beside.mkdir(parents=True)
        needed = bytes_of(collected.calls) + bytes_of(collected.state) + bytes_of(collected.moments) + len(manifest)
        free = shutil.disk_usage(beside).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it takes {shown(needed)}, and {shown(free)} are free")  # noqa: TRY301 - as the disk would say
        write_safetensors(beside / CALLS, collected.calls)
        write_safetensors(beside / STATE, {**collected.state, **collected.moments})
        _write_text(beside / LOG, "".join(f"{line}\n" for line in log))
        _write_text(beside / MANIFEST, manifest + "\n")
        _flush_folder(beside)
        size = sum(file.stat().st_size for file in beside.iterdir())
        beside.rename(folder)
        _flush_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise OutputError(
            f"no bundle is written in {folder.parent}: {(error.strerror or str(error)).lower()}"
        ) from None
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return size


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
