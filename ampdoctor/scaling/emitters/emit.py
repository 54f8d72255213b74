"""`emit`: settings in a framework's own terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ampdoctor.errors import UsageError
from ampdoctor.evidence.targets import FRAMEWORKS, Framework
from ampdoctor.scaling.emitters import configs, python
from ampdoctor.scaling.emitters.fragment import Emitted, Fragment, Language, Precision, Request
from ampdoctor.scaling.rules import expressible
from ampdoctor.scaling.settings import ScalerSettings

_EMITTERS: Mapping[Framework, tuple[Language, Callable[[Request], Fragment]]] = {
    "torch": ("python", python.torch_loop),
    "accelerate": ("python", python.accelerate),
    "transformers": ("python", python.transformers),
    "lightning": ("python", python.lightning),
    "fsdp": ("python", python.fsdp),
    "deepspeed": ("json", configs.deepspeed),
    "megatron": ("shell", configs.megatron),
    "fairseq": ("shell", configs.fairseq),
}


def emit(
    settings: ScalerSettings,
    framework: Framework,
    *,
    fp32_modules: Sequence[str] = (),
    loss_in_half: bool = False,
    precision: Precision = "fp16",
    device: str = "cuda",
) -> Emitted:
    """Returns a snippet or a piece of configuration that runs as printed, and notes on what it cannot express.

    Args:
        settings: The loss scaler at its start; its growth count is not emitted. `min_scale` is the smallest allowed
            scale: it is emitted as a guard if the framework has no floor.
        framework: The framework.
        fp32_modules: Names of modules that stay in fp32.
        loss_in_half: The loss is fp16 where it is scaled.
        precision: The run's compute precision; bf16 and fp32 need no scaler, and `settings` is ignored.
        device: Device type of the training, for frameworks that need it.

    Raises:
        UsageError: An unknown framework or precision, or settings with which no scaler works.
    """
    if framework not in FRAMEWORKS:
        raise UsageError(f"{framework!r} is none of the frameworks {', '.join(FRAMEWORKS)}")
    if precision not in get_args(Precision):
        raise UsageError(f"{precision!r} is none of the precisions {', '.join(get_args(Precision))}")
    if isinstance(fp32_modules, str):
        raise UsageError(f"fp32_modules is a list of module names, not {fp32_modules!r}")
    checked = _checked(settings) if precision == "fp16" else ScalerSettings()
    request = Request(
        settings=checked,
        real=expressible(checked, framework),
        precision=precision,
        islands=() if precision == "fp32" else tuple(fp32_modules),
        loss_in_half=loss_in_half,
        device=device,
    )
    language, make = _EMITTERS[framework]
    fragment = make(request)
    text = "".join(f"{line}\n" for line in fragment.lines)
    return Emitted(framework=framework, language=language, text=text, notes=fragment.notes)


def _checked(settings: ScalerSettings) -> ScalerSettings:
    """Returns the same as Python's own numbers.

    Raises:
        UsageError: A scaler with these settings never grows, never backs off or has no usable scale.
    """
    scale = _number(settings, "scale", above=0.0, below=math.inf)
    floor = settings.min_scale
    if floor is not None and not 0.0 < floor <= scale:
        raise UsageError(f"a loss scaler's min_scale lies above 0 and not above its scale of {scale:g}, unlike {floor}")
    return replace(
        settings,
        scale=scale,
        growth_factor=_number(settings, "growth_factor", above=1.0, below=math.inf),
        backoff_factor=_number(settings, "backoff_factor", above=0.0, below=1.0),
        growth_interval=_count(settings, "growth_interval"),
        min_scale=None if floor is None else float(floor),
        hysteresis=_count(settings, "hysteresis"),
    )


def _number(settings: ScalerSettings, name: str, *, above: float, below: float) -> float:
    value = float(getattr(settings, name))
    if not above < value < below:
        limits = f"above {above:g}" if math.isinf(below) else f"between {above:g} and {below:g}"
        raise UsageError(f"a loss scaler's {name} is a finite number {limits}, not {value:g}")
    return value


def _count(settings: ScalerSettings, name: str) -> int:
    value: Any = getattr(settings, name)
    if not (math.isfinite(value) and value == int(value) and value >= 1):
        raise UsageError(f"a loss scaler's {name} is a whole number of at least 1, not {value}")
    return int(value)
