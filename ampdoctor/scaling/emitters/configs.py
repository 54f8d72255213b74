"""Frameworks that take numbers: DeepSpeed's JSON, and the flags of Megatron-LM and fairseq. Each has its own scaler.

Read in deepspeed 0.19.8 (runtime/precision_config.py, runtime/fp16/), megatron-core 0.16.1 (core/optimizer/) and
fairseq 0.12.2 (dataclass/configs.py, optim/).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ampdoctor.evidence.python_lines import quoted
from ampdoctor.scaling.emitters.fragment import Fragment, Request, number

SHOWN = 8
"""Maximum number of module names in one sentence."""


def deepspeed(request: Request) -> Fragment:
    """The sections `fp16` and `bf16` of a DeepSpeed configuration."""
    sections: dict[str, dict[str, Any]] = {half: {"enabled": request.precision == half} for half in ("fp16", "bf16")}
    if request.precision != "fp16":
        return Fragment(lines=_json(sections), notes=tuple(_islands(request, "DeepSpeed")))
    real = request.real
    sections["fp16"] |= {
        "loss_scale": 0,  # a dynamic one
        "initial_scale_power": round(math.log2(real.scale)),
        "loss_scale_window": real.growth_interval,
        "hysteresis": real.hysteresis,
        "consecutive_hysteresis": False,
        "min_loss_scale": int(real.min_scale or 1),
    }
    return Fragment(
        lines=_json(sections),
        notes=(
            *request.differences(),
            *_deepspeed_floor(request),
            *_hysteresis(request, "; without ZeRO (stage 0) there is no hysteresis"),
            f"from the start and from each overflow it takes {real.growth_interval + 1} clean steps to the next growth",
            *request.half_loss("ZeRO scales the loss in its own dtype", "write `engine.backward(loss.float())`"),
            *_islands(request, "DeepSpeed"),
            "resumed with its optimizer's state, a run goes on with the checkpoint's settings instead of these",
        ),
    )


def megatron(request: Request) -> Fragment:
    """Flags of Megatron-LM's training scripts."""
    islands = tuple(_islands(request, "Megatron-LM"))
    if request.precision != "fp16":
        return Fragment(lines=_flags("pretrain_gpt.py", *_half(request)), notes=islands)
    real = request.real
    floor = real.min_scale or 1.0
    flags = (
        "--fp16",
        f"--initial-loss-scale {number(real.scale)}",
        f"--min-loss-scale {number(floor)}",
        f"--loss-scale-window {real.growth_interval}",
        f"--hysteresis {real.hysteresis}",
    )
    return Fragment(
        lines=_flags("pretrain_gpt.py", *flags),
        notes=(
            *request.differences(),
            f"at the scale {floor:g} Megatron-LM goes on skipping steps and never stops",
            *_hysteresis(request),
            *islands,
        ),
    )


def fairseq(request: Request) -> Fragment:
    """Flags of fairseq-train."""
    islands = tuple(_islands(request, "fairseq"))
    if request.precision != "fp16":
        return Fragment(lines=_flags("fairseq-train", *_half(request)), notes=islands)
    real = request.real
    flags = ["--fp16", f"--fp16-init-scale {number(real.scale)}", f"--fp16-scale-window {real.growth_interval}"]
    floor = request.settings.min_scale
    stop = None if floor is None else _next_below(floor, real.scale)
    if stop is not None:
        flags.append(f"--min-loss-scale {number(stop)}")
    return Fragment(
        lines=_flags("fairseq-train", *flags),
        notes=(
            *request.differences(),
            *([] if stop is None else [f"fairseq stops where the scale reaches --min-loss-scale: below {floor:g}"]),
            "the window counts updates; without the flag it is 2^14 divided by ranks and by --update-freq",
            "keep to --fp16: under --amp, --amp-init-scale becomes the window where --amp-scale-window is given",
            *request.half_loss("fairseq scales the loss in its own dtype", "return `loss.float()` from the criterion"),
            *islands,
        ),
    )


def _deepspeed_floor(request: Request) -> Iterator[str]:
    wanted, floor = request.settings.min_scale, int(request.real.min_scale or 1)
    if wanted is not None and wanted != floor:
        yield f"the floor is {floor} instead of {wanted:g}: it is a whole number there, at least 1"
    yield f"at the scale {floor} the next overflow ends the run under ZeRO 1 to 3; without ZeRO steps are skipped on"


def _next_below(floor: float, scale: float) -> float:
    """Returns the first scale below the floor that repeated halving reaches."""
    while scale >= floor:
        scale /= 2.0
    return scale


def _hysteresis(request: Request, otherwise: str = "") -> Iterator[str]:
    if request.real.hysteresis > 1:
        yield (
            "only growth refills the hysteresis: overflows use it up however far apart they are, and then each one "
            f"backs off{otherwise}"
        )


def _islands(request: Request, framework: str) -> Iterator[str]:
    if request.islands:
        shown = ", ".join(map(quoted, request.islands[:SHOWN]))
        more = f" and {len(request.islands) - SHOWN} more" if len(request.islands) > SHOWN else ""
        yield (
            f"{framework} casts the whole model: what is to stay in fp32 ({shown}{more}) has to be cast, with its "
            "inputs, in the model's own code"
        )


def _half(request: Request) -> tuple[str, ...]:
    return ("--bf16",) if request.precision == "bf16" else ()


def _json(sections: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(json.dumps(sections, indent=2).splitlines())


def _flags(script: str, *flags: str) -> tuple[str, ...]:
    """Returns a bash array, and a comment on its use."""
    return ("AMP_ARGS=(", *(f"    {flag}" for flag in flags), f')  # then: {script} ... "${{AMP_ARGS[@]}}"')
