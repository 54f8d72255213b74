"""Frameworks whose users write the loop, or the Trainer's arguments, in Python: all of them run torch's own scaler.

Held to torch 2.13, accelerate 1.15, transformers 5.23 and lightning 2.6.6 in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.evidence.python_lines import apply_call, autocast_step, call, keywords, literal, quoted
from ampdoctor.scaling.emitters.fragment import Fragment, Request

_TORCH_DTYPE = {"bf16": "bfloat16", "fp32": "float32"}
_ACCELERATE = {"bf16": "bf16", "fp32": "no"}
_TRAINING_ARGUMENTS = {"fp16": "fp16=True", "bf16": "bf16=True", "fp32": ""}
_LIGHTNING = {"bf16": "bf16-mixed", "fp32": "32-true"}
_BEFORE_FSDP = (
    "call `ampdoctor.apply` before FSDP wraps the model, and take half precision from torch.autocast: FSDP's own "
    "MixedPrecision casts the parameters of these modules as well"
)
_INSIDE = "where a LightningModule holds the model that was measured as an attribute, apply to that attribute"
_STAYS_HALF = "GradScaler leaves a half loss half unless it has no dimension at all"


def torch_loop(request: Request) -> Fragment:
    """Returns a fragment for a user's own loop with torch.amp."""
    if request.precision != "fp16":
        return _without_scaler(request)
    return _python(
        request,
        ("import torch",),
        _scaler(request, "torch.amp.GradScaler"),
        (
            *request.differences(),
            *request.half_loss(_STAYS_HALF, "write `scaler.scale(loss.float())`"),
            *_resumed(request, "scaler"),
        ),
    )


def fsdp(request: Request) -> Fragment:
    """Returns a fragment for FSDP1 around a user's own loop: its scaler agrees on overflows across the shards."""
    notes = (_BEFORE_FSDP,) if request.islands else ()
    if request.precision != "fp16":
        fragment = _without_scaler(request)
        return Fragment(lines=fragment.lines, notes=notes)
    return _python(
        request,
        ("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler",),
        _scaler(request, "ShardedGradScaler"),
        (
            *request.differences(),
            *request.half_loss(
                "ShardedGradScaler casts the scaled loss back to the loss's own dtype",
                "write `scaler.scale(loss.float())`",
            ),
            *notes,
            "FSDP2 (fully_shard) needs no sharded scaler: emit for torch",
            *_resumed(request, "scaler"),
        ),
    )


def accelerate(request: Request) -> Fragment:
    """Returns a fragment for Hugging Face Accelerate."""
    importing = "from accelerate import Accelerator"
    if request.precision != "fp16":
        mode = quoted(_ACCELERATE[request.precision])
        return _python(request, (importing,), (f"accelerator = Accelerator(mixed_precision={mode})",))
    lines = [
        *call("scaling = GradScalerKwargs(", keywords(request.settings.arguments())),
        'accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])',
    ]
    guarded = []
    if request.settings.min_scale is not None:
        floor = literal(request.settings.min_scale)
        lines += [
            "",
            "",
            "def check_scale():",
            f"    if accelerator.scaler is not None and accelerator.scaler.get_scale() < {floor}:",
            f"        raise FloatingPointError({_fallen(floor)})",
        ]
        guarded = ["Accelerate makes its scaler itself, without a floor: call `check_scale()` after `optimizer.step()`"]
    return _python(
        request,
        (importing, "from accelerate.utils import GradScalerKwargs"),
        tuple(lines),
        (
            *request.differences(),
            *guarded,
            *request.half_loss(_STAYS_HALF, "write `accelerator.backward(loss.float())`"),
            "under DeepSpeed or Megatron-LM these arguments are not used: emit for those",
            *_resumed(request, "accelerator.scaler"),
        ),
    )


def transformers(request: Request) -> Fragment:
    """Returns a fragment for the Trainer of Hugging Face transformers: its arguments say the precision alone."""
    importing = "from transformers import Trainer, TrainingArguments"
    made = f"trainer = Trainer(model, TrainingArguments({_TRAINING_ARGUMENTS[request.precision]}))"
    if request.precision != "fp16":
        return _python(request, (importing,), (made,))
    return _python(
        request,
        ("import torch", importing),
        (
            *_scaler(request, "torch.amp.GradScaler"),
            made,
            "trainer.accelerator.scaler = scaler",
        ),
        (
            *request.differences(),
            *request.half_loss(_STAYS_HALF, "return `loss.float()` from `compute_loss`"),
            "TrainingArguments has no argument for the scaler: it is put into the Trainer before `trainer.train()`",
            "under DeepSpeed this scaler is not used: emit for that",
            *_resumed(request, "trainer.accelerator.scaler"),
        ),
    )


def lightning(request: Request) -> Fragment:
    """Returns a fragment for PyTorch Lightning."""
    importing = "from lightning.pytorch import Trainer"
    notes = (_INSIDE,) if request.islands else ()
    if request.precision != "fp16":
        mode = quoted(_LIGHTNING[request.precision])
        return _python(request, (importing,), (f"trainer = Trainer(precision={mode})",), notes)
    plugin = f'MixedPrecision("16-mixed", {quoted(request.device)}, scaler=scaler)'
    return _python(
        request,
        ("import torch", importing, "from lightning.pytorch.plugins import MixedPrecision"),
        (*_scaler(request, "torch.amp.GradScaler"), f"trainer = Trainer(plugins=[{plugin}])"),
        (
            *request.differences(),
            *request.half_loss(_STAYS_HALF, "return `loss.float()` from `training_step`"),
            "leave `precision=` out of the Trainer: the plugin stands for it",
            'strategy="fsdp" takes no scaler of one\'s own: `FSDPPrecision(scaler=...)` raises (Lightning 2.6.6)',
            *notes,
            *_resumed(request, "scaler"),
        ),
    )


def _without_scaler(request: Request) -> Fragment:
    """Returns a fragment for a user's own loop in bf16 or fp32."""
    imports = ("import torch",) if request.precision == "bf16" else ()
    return _python(request, imports, autocast_step(request.device, _TORCH_DTYPE[request.precision]))


def _python(request: Request, imports: tuple[str, ...], body: tuple[str, ...], notes: tuple[str, ...] = ()) -> Fragment:
    """Returns imports, islands and body, with blank lines as formatters want them."""
    lines = list(imports)
    if request.islands:
        importing, *applied = apply_call("fp32_modules", request.islands)
        body = (*applied, *([""] * 2 if body[0].startswith("class ") else []), *body)
        lines += ["", importing]
    if lines:
        lines += [""] * (2 if body[0].startswith("class ") else 1)
    return Fragment(lines=(*lines, *body), notes=notes)


def _scaler(request: Request, name: str) -> tuple[str, ...]:
    """Returns the lines that build `scaler`; with a floor, it is of a class that stops the run there.

    GradScaler has no floor: at a scale of 2^-128 its inverse is infinite in fp32, and a clean step ruins the weights.
    The guard is a class rather than a line for the loop, because Trainers call `update()` themselves.
    """
    guard: tuple[str, ...] = ()
    if request.settings.min_scale is not None:
        floor = literal(request.settings.min_scale)
        guard = (
            f"class GuardedScaler({name}):",
            f'    """Stops the run where the loss scale falls below {floor}; its base has no floor."""',
            "",
            "    def update(self, new_scale=None):",
            "        super().update(new_scale)",
            f"        if self.is_enabled() and self.get_scale() < {floor}:",
            f"            raise FloatingPointError({_fallen(floor)})",
            "",
            "",
        )
        name = "GuardedScaler"
    arguments = [quoted(request.device), *keywords(request.settings.arguments())]
    return (*guard, *call(f"scaler = {name}(", arguments))


def _fallen(floor: str) -> str:
    return quoted(f"the loss scale fell below {floor}: no scale keeps the gradients finite")


def _resumed(request: Request, scaler: str) -> Iterator[str]:
    """Yields what loading a checkpoint undoes; a count of clean steps beyond the new interval would never reach it."""
    kept = {name: value for name, value in request.settings.arguments().items() if name != "init_scale"}
    entries = ", ".join(f"{quoted(name)}: {literal(value)}" for name, value in {**kept, "_growth_tracker": 0}.items())
    yield (
        "a scaler's state from a checkpoint overwrites these settings with its own; to keep them, and its scale, write "
        f"after it is loaded: `{scaler}.load_state_dict({{**{scaler}.state_dict(), {entries}}})`"
    )
