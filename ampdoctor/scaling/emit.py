"""Settings in the form of other frameworks: a fragment that runs as printed, and notes on what it cannot express."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ampdoctor.evidence.python_lines import apply_call, autocast_step, call, keywords, literal, quoted
from ampdoctor.evidence.report_scaler import EmittedSettings, Language
from ampdoctor.evidence.targets import Framework
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.scaling.scalers import ScalerSettings, expressible

# -- an emitter's request and result, and shared remarks --


Precision = Literal["fp16", "bf16", "fp32"]
Fragment = tuple[tuple[str, ...], tuple[str, ...]]
"""The result of one emitter: lines without newlines, and notes as in `EmittedSettings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to an emitter."""

    settings: ScalerSettings
    real: ScalerSettings  # the settings as the framework will run them
    precision: Precision  # the run's compute precision; the settings matter only for fp16
    in_fp32: tuple[str, ...]  # modules that compute in fp32 nevertheless; () if the whole run does
    loss_in_half: bool  # the loss is fp16 where it is scaled
    device: str  # device type of the training

    def differences(self) -> Iterator[str]:
        """Yields a sentence for each setting that the framework runs with another value."""
        wanted, real = self.settings, self.real
        if real.scale != wanted.scale:
            yield f"the scale starts at {real.scale:g} instead of {wanted.scale:g}, which cannot be said there"
        for name in ("growth_factor", "backoff_factor"):
            asked, fixed = getattr(wanted, name), getattr(real, name)
            if fixed != asked:
                yield f"the {name.replace('_', ' ')} is fixed at {fixed:g} there, instead of {asked:g}"

    def half_loss(self, why: str, remedy: str) -> Iterator[str]:
        """Yields a remark if the loss is fp16 where it is scaled: why that matters there, and the remedy."""
        if self.loss_in_half:
            limit = FORMATS["fp16"].overflow_at / self.real.scale
            yield f"{why}: at this scale one of {limit:g} or more becomes inf, so {remedy}"


def number(value: float) -> str:
    """Formats a number for a command line: a whole one without a point, so that integer options accept it."""
    return str(int(value)) if value == int(value) else repr(value)


# -- frameworks with Python settings, which all run torch's own scaler --
#
# Tests run torch 2.13, accelerate 1.15, transformers 5.23 and lightning 2.6.6.


_TORCH_DTYPE = {"bf16": "bfloat16", "fp32": "float32"}
_ACCELERATE = {"bf16": "bf16", "fp32": "no"}
_TRAINING_ARGUMENTS = {"fp16": "fp16=True", "bf16": "bf16=True", "fp32": ""}
_LIGHTNING = {"bf16": "bf16-mixed", "fp32": "32-true"}
_INSIDE = "where a LightningModule holds the model that was measured as an attribute, apply to that attribute"
_STAYS_HALF = "GradScaler leaves a half loss half unless it has no dimension at all"


def _torch_loop(request: Request) -> Fragment:
    if request.precision != "fp16":
        imports = ("import torch",) if request.precision == "bf16" else ()
        return _python(request, imports, autocast_step(request.device, _TORCH_DTYPE[request.precision]))
    return _python(
        request,
        ("import torch",),
        _scaler(request),
        (
            *request.half_loss(_STAYS_HALF, "write `scaler.scale(loss.float())`"),
            "FSDP1 needs torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler in its place; FSDP2 does not",
            *_resumed(request, "scaler"),
        ),
    )


def _accelerate(request: Request) -> Fragment:
    importing = "from accelerate import Accelerator"
    if request.precision != "fp16":
        mode = quoted(_ACCELERATE[request.precision])
        return _python(request, (importing,), (f"accelerator = Accelerator(mixed_precision={mode})",))
    return _python(
        request,
        (importing, "from accelerate.utils import GradScalerKwargs"),
        (
            *call("scaling = GradScalerKwargs(", keywords(request.settings.arguments())),
            'accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])',
        ),
        (
            *request.half_loss(_STAYS_HALF, "write `accelerator.backward(loss.float())`"),
            "under DeepSpeed or Megatron-LM these arguments are not used: emit for those",
            *_resumed(request, "accelerator.scaler"),
        ),
    )


def _transformers(request: Request) -> Fragment:
    importing = "from transformers import Trainer, TrainingArguments"
    made = f"trainer = Trainer(model, TrainingArguments({_TRAINING_ARGUMENTS[request.precision]}))"
    if request.precision != "fp16":
        return _python(request, (importing,), (made,))
    return _python(
        request,
        ("import torch", importing),
        (*_scaler(request), made, "trainer.accelerator.scaler = scaler"),
        (
            *request.half_loss(_STAYS_HALF, "return `loss.float()` from `compute_loss`"),
            "TrainingArguments has no argument for the scaler: it is put into the Trainer before `trainer.train()`",
            "under DeepSpeed this scaler is not used: emit for that",
            *_resumed(request, "trainer.accelerator.scaler"),
        ),
    )


def _lightning(request: Request) -> Fragment:
    importing = "from lightning.pytorch import Trainer"
    notes = (_INSIDE,) if request.in_fp32 else ()
    if request.precision != "fp16":
        mode = quoted(_LIGHTNING[request.precision])
        return _python(request, (importing,), (f"trainer = Trainer(precision={mode})",), notes)
    plugin = f'MixedPrecision("16-mixed", {quoted(request.device)}, scaler=scaler)'
    return _python(
        request,
        ("import torch", importing, "from lightning.pytorch.plugins import MixedPrecision"),
        (*_scaler(request), f"trainer = Trainer(plugins=[{plugin}])"),
        (
            *request.half_loss(_STAYS_HALF, "return `loss.float()` from `training_step`"),
            "leave `precision=` out of the Trainer: the plugin stands for it",
            'strategy="fsdp" takes no scaler of one\'s own: `FSDPPrecision(scaler=...)` raises (Lightning 2.6.6)',
            *notes,
            *_resumed(request, "scaler"),
        ),
    )


def _python(request: Request, imports: tuple[str, ...], body: tuple[str, ...], notes: tuple[str, ...] = ()) -> Fragment:
    """Returns imports, fp32 modules and body, with blank lines as formatters expect."""
    lines = list(imports)
    if request.in_fp32:
        importing, *applied = apply_call("fp32_modules", request.in_fp32)
        body = (*applied, *body)
        lines += ["", importing]
    if lines:
        lines.append("")
    return (*lines, *body), notes


def _scaler(request: Request) -> tuple[str, ...]:
    arguments = [quoted(request.device), *keywords(request.settings.arguments())]
    return call("scaler = torch.amp.GradScaler(", arguments)


def _resumed(request: Request, scaler: str) -> Iterator[str]:
    """Yields what loading a checkpoint undoes; a count of clean steps above the new interval would never reach it."""
    kept = {name: value for name, value in request.settings.arguments().items() if name != "init_scale"}
    entries = ", ".join(f"{quoted(name)}: {literal(value)}" for name, value in {**kept, "_growth_tracker": 0}.items())
    yield (
        "a scaler's state from a checkpoint overwrites these settings with its own; to keep them, and its scale, write "
        f"after it is loaded: `{scaler}.load_state_dict({{**{scaler}.state_dict(), {entries}}})`"
    )


# -- frameworks with numeric settings and their own scalers: DeepSpeed's JSON, flags of Megatron-LM --
#
# Sources: deepspeed 0.19.8 (runtime/precision_config.py, runtime/fp16/), megatron-core 0.16.1 (core/optimizer/).


SHOWN = 8  # most module names in one sentence


def _deepspeed(request: Request) -> Fragment:
    sections: dict[str, dict[str, Any]] = {half: {"enabled": request.precision == half} for half in ("fp16", "bf16")}
    if request.precision != "fp16":
        return _json(sections), tuple(_in_fp32(request, "DeepSpeed"))
    real, floor = request.real, int(request.real.min_scale or 1)
    sections["fp16"] |= {
        "loss_scale": 0,  # dynamic
        "initial_scale_power": round(math.log2(real.scale)),
        "loss_scale_window": real.growth_interval,
        "hysteresis": real.hysteresis,
        "consecutive_hysteresis": False,
        "min_loss_scale": floor,
    }
    return _json(sections), (
        *request.differences(),
        f"at the scale {floor} the next overflow ends the run under ZeRO 1 to 3; without ZeRO steps are skipped on",
        *request.half_loss("ZeRO scales the loss in its own dtype", "write `engine.backward(loss.float())`"),
        *_in_fp32(request, "DeepSpeed"),
        "resumed with its optimizer's state, a run goes on with the checkpoint's settings instead of these",
    )


def _megatron(request: Request) -> Fragment:
    in_fp32 = tuple(_in_fp32(request, "Megatron-LM"))
    if request.precision != "fp16":
        return _flags(*(("--bf16",) if request.precision == "bf16" else ())), in_fp32
    real = request.real
    floor = real.min_scale or 1.0
    flags = (
        "--fp16",
        f"--initial-loss-scale {number(real.scale)}",
        f"--min-loss-scale {number(floor)}",
        f"--loss-scale-window {real.growth_interval}",
        f"--hysteresis {real.hysteresis}",
    )
    return _flags(*flags), (
        *request.differences(),
        f"at the scale {floor:g} Megatron-LM goes on skipping steps and never stops",
        *in_fp32,
    )


def _in_fp32(request: Request, framework: str) -> Iterator[str]:
    if request.in_fp32:
        shown = ", ".join(map(quoted, request.in_fp32[:SHOWN]))
        more = f" and {len(request.in_fp32) - SHOWN} more" if len(request.in_fp32) > SHOWN else ""
        yield (
            f"{framework} casts the whole model: what is to stay in fp32 ({shown}{more}) has to be cast, with its "
            "inputs, in the model's own code"
        )


def _json(sections: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(json.dumps(sections, indent=2).splitlines())


def _flags(*flags: str) -> tuple[str, ...]:
    """Returns a bash array, and a comment on its use."""
    return ("AMP_ARGS=(", *(f"    {flag}" for flag in flags), ')  # then: pretrain_gpt.py ... "${AMP_ARGS[@]}"')


# -- the entry point --


_EMITTERS: Mapping[Framework, tuple[Language, Callable[[Request], Fragment]]] = {
    "torch": ("python", _torch_loop),
    "accelerate": ("python", _accelerate),
    "transformers": ("python", _transformers),
    "lightning": ("python", _lightning),
    "deepspeed": ("json", _deepspeed),
    "megatron": ("shell", _megatron),
}


def emit(
    settings: ScalerSettings,
    framework: Framework,
    *,
    fp32_modules: Sequence[str] = (),
    loss_in_half: bool = False,
    precision: Precision = "fp16",
    device: str = "cuda",
) -> EmittedSettings:
    """Returns a snippet or a piece of configuration that runs as printed, and notes on what it cannot express.

    `settings` are of a scaler that works, at its start. bf16 and fp32 need no scaler. The loss is fp16 where it is
    scaled (`loss_in_half`).
    """
    settings = settings if precision == "fp16" else ScalerSettings()
    request = Request(
        settings=settings,
        real=expressible(settings, framework),
        precision=precision,
        in_fp32=() if precision == "fp32" else tuple(fp32_modules),
        loss_in_half=loss_in_half,
        device=device,
    )
    language, make = _EMITTERS[framework]
    lines, notes = make(request)
    text = "".join(f"{line}\n" for line in lines)
    return EmittedSettings(framework=framework, language=language, text=text, notes=notes)
