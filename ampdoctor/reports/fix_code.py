"""Lines of Python that apply a prescription in a training script: with `ampdoctor.apply`, and in plain torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.diagnosis.replay.nonfinite import MISUSE_ADVICE
from ampdoctor.evidence.python_lines import apply_call, autocast_step, fitting, keywords, literal, quoted
from ampdoctor.evidence.report import Finding, Prescription, Report
from ampdoctor.evidence.report_health import HealthSection
from ampdoctor.evidence.report_replay import NOT_THE_ORDER
from ampdoctor.reports.text import SCALER, in_order

_HALF = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """The training that the lines are for."""

    device: str = "cuda"  # device type of the user's training; a CPU replay under CUDA's policy stands for a GPU
    half: str = "float16"  # the half dtype that it computes in
    autocast: bool = True  # False for a half model without autocast
    scaled: bool = True  # False without a GradScaler: then one must be added to the loop
    batch_holds: str = ""  # "nan" or "inf" where the finding's batch itself holds it


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste; one of the two is enough, and () means that there are none.

    Attributes:
        apply: With `ampdoctor.apply`, where model, optimizer and scaler have been built.
        torch: The same without ampdoctor.
    """

    apply: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()


def setting_of(report: Report, finding: Finding | None = None) -> TrainingContext:
    """Return the training behind a report; for a log, the training of `finding`.

    A scan stands for autocast in fp16 on a GPU, with a scaler.
    """
    if report.health is not None:
        return _logged(report.health, finding)
    run, scaler = report.run, None if report.scaler is None else report.scaler.current
    native_cpu = run.get("policy") == "native" and str(run.get("device", "")).startswith("cpu")
    on_cpu = native_cpu or run.get("autocast_on") == "cpu"
    return TrainingContext(
        device="cpu" if on_cpu else "cuda",
        half=_HALF.get(str(run.get("precision")), "float16"),
        autocast=run.get("autocast", True) is not False,
        scaled=not run or (scaler is not None and not scaler.get("by_hand")),
        batch_holds=(finding.where.nonfinite or "") if finding and finding.evidence.get("origin") == "data" else "",
    )


def _logged(health: HealthSection, finding: Finding | None) -> TrainingContext:
    """Return the training behind a log, from the look at the finding's step, or else from the last look."""
    where = None if finding is None else finding.where
    runs = [run for run in health.runs if where is None or where.file in (None, run.source)]
    looks = [look for run in runs for look in run.looks if look.device is not None]
    if not looks:
        return TrainingContext()
    look = max(reversed(looks), key=lambda look: where is not None and look.step == where.step)
    return TrainingContext(
        device="cpu" if look.device == "cpu" else "cuda",
        half=_HALF.get(str(look.precision), "float16"),
        autocast=look.autocast is not False,
    )


def code_of(prescription: Prescription, setting: TrainingContext, cause: str | None = None) -> Code:
    """Return the lines for a change; none for one that a replay has disproved, or that needs words instead.

    The names `model`, `optimizer`, `scaler`, `loss_fn`, `batch`, `batches` and `max_norm` stand for the user's own.
    """
    if prescription.status in ("failed", "worse"):
        return Code()
    if prescription.kind == "code" and cause == "scaler_misuse":
        return Code() if prescription.value in NOT_THE_ORDER else Code(torch=_misuse_lines(str(prescription.value)))
    if prescription.kind == "init_scale" and cause == "scaler_misuse":
        return Code(_apply(prescription, "scaler"), _CONTINUED)
    if prescription.kind == "fp32_modules" and cause == "optimizer_precision" and setting.autocast:
        return _stored_in_fp32(prescription)
    make = _MAKERS.get(prescription.kind)
    if isinstance(prescription.value, Mapping):
        prescription = replace(prescription, value=in_order(prescription.value, SCALER))
    return Code() if make is None else make(prescription, setting)


_BACKWARD, _UNSCALE = "scaler.scale(loss).backward()", "scaler.unscale_(optimizer)"
_CLIP, _STEP = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)", "scaler.step(optimizer)"
_UPDATE = "scaler.update()"
_MISUSE_LINES: Mapping[str, tuple[str, ...]] = {
    "optimizer.step": (f"{_STEP}  # not optimizer.step(): this leaves out a step that overflowed", _UPDATE),
    "clip_grad_norm_": (_UNSCALE, _CLIP, _STEP),
    "gradient clipping": (_UNSCALE, f"{_CLIP}  # or what changes them", _STEP),
    "unscale": (f"{_UNSCALE}  # the only division by the scale", _STEP),
    "scaler.unscale_": (f"{_BACKWARD}  # of each micro-batch", f"{_UNSCALE}  # once they all are done", _STEP),
    "scaler.unscale_ late": (_UNSCALE, _STEP, _UPDATE),
    "scaler.update": (_STEP, f"{_UPDATE}  # once, after every step"),
    "backward": (f"{_BACKWARD}  # each loss, with the same scaler",),
    "GradScaler.scale": ("scaler.scale(loss + penalty).backward()",),
    "optimizer.zero_grad": ("optimizer.zero_grad()", f"{_BACKWARD}  # the loss that this optimizer trains"),
    "Tensor.grad": ("gradient = parameter.grad / scaler.get_scale()",),
    "scaler.step": (f"{_STEP}  # of the scaler that scaled the loss", f"{_UPDATE}  # once, at the end"),
    "autograd.grad": (
        "grads = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)",
        "grads = [grad / scaler.get_scale() for grad in grads]",
    ),
    "zero_grad": (_UPDATE, "optimizer.zero_grad()  # after a skipped step as well"),
    "optimizer.step again": (f"{_STEP}  # once for each backward", _UPDATE),
}
"""The lines of torch's AMP recipe that a misuse of the scaler lacks; keys as in `MISUSE_ADVICE`."""
_LINES_OF = {MISUSE_ADVICE[misuse]: lines for misuse, lines in _MISUSE_LINES.items()}
_VARIABLE = re.compile(r"\.(?:unscale_|step)\(([\w.]+)\)")


def _misuse_lines(advice: str) -> tuple[str, ...]:
    """Return the lines for an advice, which may name the user's own variable (`for_optimizer`)."""
    named = _VARIABLE.search(advice)
    variable = "optimizer" if named is None else named[1]
    general = re.sub(rf"(?<![\w.]){re.escape(variable)}\b", "optimizer", advice)
    lines = _LINES_OF.get(general, (_BACKWARD, _STEP, _UPDATE))
    return tuple(re.sub(r"\boptimizer\b", variable, line) for line in lines)


_CONTINUED = ('scaler.load_state_dict(checkpoint["scaler"])  # with model and optimizer, where the run resumes',)


def _fp32_modules(prescription: Prescription, setting: TrainingContext) -> Code:
    names = _names(prescription.value)
    if not names:
        return Code()
    if not setting.autocast:
        return Code(_apply(prescription, "optimizer"))
    return Code(
        _apply(prescription),
        (
            "from torch.utils._pytree import tree_map_only",
            "",
            "",
            "def widen(x):",
            "    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
            "",
            "",
            "def in_fp32(forward):",
            "    def call(*args, **kwargs):",
            "        args, kwargs = tree_map_only(torch.Tensor, widen, (args, kwargs))",
            f"        with torch.autocast({quoted(setting.device)}, enabled=False):",
            "            return forward(*args, **kwargs)",
            "",
            "    return call",
            "",
            "",
            *fitting("for name in ", names, ":"),
            "    module = model.get_submodule(name)",
            "    module.forward = in_fp32(module.forward)",
        ),
    )


def _stored_in_fp32(prescription: Prescription) -> Code:
    """Return lines for half parameters that lose bits between steps, whose forward may never run (a frozen EMA)."""
    names = _names(prescription.value)
    if not names:
        return Code()
    comment = "  # before the optimizer is built"
    lines: tuple[str, ...] = (f"model.get_submodule({literal(names[0])}).float(){comment}",)
    if len(names) > 1:
        lines = (*fitting("for name in ", names, ":"), f"    model.get_submodule(name).float(){comment}")
    return Code(_apply(prescription, "optimizer"), lines)


def _names(value: Any) -> Sequence[Any]:
    return () if isinstance(value, str) or not isinstance(value, Sequence) else value


def _dtype(prescription: Prescription, setting: TrainingContext) -> Code:
    dtype = str(prescription.value).removeprefix("torch.")
    if dtype not in ("bfloat16", "float32"):
        return Code()
    if not setting.autocast:
        return Code(
            _apply(prescription, "optimizer"),
            (f"model.to(torch.{dtype})  # before the optimizer is built; inputs that are half likewise",),
        )
    return Code(_apply(prescription), autocast_step(setting.device, dtype, f"not {setting.half}"))


def _init_scale(prescription: Prescription, setting: TrainingContext) -> Code:
    """Return lines for a new scale; none for a step with manual scaling or its own scaler, whose line is unknown."""
    if not _is_number(prescription.value) or not setting.scaled:
        return Code()
    return Code(_apply(prescription, "scaler"), (_built({"init_scale": prescription.value}, setting),))


def _scaler(prescription: Prescription, setting: TrainingContext) -> Code:
    """Return lines for a scaler; only plain torch without one, since `apply` changes a scaler and scales no loss."""
    settings = prescription.value
    if not isinstance(settings, Mapping) or not all(_is_number(number) for number in settings.values()):
        return Code()
    return Code(
        _apply(prescription, "scaler") if setting.scaled else (),
        (
            _built(settings, setting),
            "",
            "scaler.scale(loss).backward()  # in each step, in place of loss.backward()",
            "scaler.step(optimizer)  # in place of optimizer.step()",
            "scaler.update()",
        ),
    )


def _optimizer(prescription: Prescription, _setting: TrainingContext) -> Code:
    settings = prescription.value
    if not isinstance(settings, Mapping) or not settings or not all(_is_number(n) for n in settings.values()):
        return Code()
    lines = [f"    group[{quoted(str(name))}] = {literal(number)}" for name, number in settings.items()]
    arguments = ", ".join(keywords(settings))
    first = f"for group in optimizer.param_groups:  # or where it is built: ..., {arguments})"
    return Code(_apply(prescription, "optimizer"), (first, *lines))


def _skip_batch(prescription: Prescription, setting: TrainingContext) -> Code:
    """Return a check that works in any loop where the batch is not finite; else lines that count the batches."""
    batch = prescription.value
    if not isinstance(batch, int):
        return Code()
    if setting.batch_holds in ("nan", "inf"):
        return Code(
            torch=(
                "from torch.utils._pytree import tree_leaves",
                "",
                "for batch in batches:",
                f"    if any(torch.is_tensor(t) and t.is{setting.batch_holds}().any() for t in tree_leaves(batch)):",
                f"        continue  # batch {batch} of the replay is one of these",
            )
        )
    return Code(
        torch=(
            "index = -1  # where the replay begins: before the first epoch, or behind the checkpoint",
            "for batch in batches:",
            "    index += 1  # counts the batches of all epochs",
            f"    if index == {batch}:  # the same batch only in the same order: seed what shuffles",
            "        continue",
        )
    )


_MAKERS: Mapping[str, Callable[[Prescription, TrainingContext], Code]] = {
    "fp32_modules": _fp32_modules,
    "dtype": _dtype,
    "init_scale": _init_scale,
    "scaler": _scaler,
    "optimizer": _optimizer,
    "skip_batch": _skip_batch,
}


def _apply(prescription: Prescription, *parts: str) -> tuple[str, ...]:
    """Return the call of `ampdoctor.apply`, with optimizer or scaler as keywords, and a mark if it is unproven."""
    arguments = "".join(f", {part}={part}" for part in parts)
    if prescription.verified:
        return apply_call(prescription.kind, prescription.value, arguments=arguments)
    arguments += ", unverified=True"
    return apply_call(prescription.kind, prescription.value, status=prescription.status, arguments=arguments)


def _built(settings: Mapping[str, Any], setting: TrainingContext) -> str:
    arguments = ", ".join(keywords(settings))
    return f"scaler = torch.amp.GradScaler({quoted(setting.device)}, {arguments})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
