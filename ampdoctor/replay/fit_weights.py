"""Matches a checkpoint's weights and buffers with a model, and reports what does not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.names import clean_tensor_names, common_prefix_fit, match_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

_SHOWN = 3  # maximum number of names in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """Weights that have been checked against a model and can be loaded."""

    model: nn.Module
    state: Mapping[str, Any] = field(default_factory=dict)  # for `model.load_state_dict`, with the model's own keys
    missing: tuple[str, ...] = ()  # in the model only, without tied names and torch's own exceptions
    unexpected: tuple[str, ...] = ()  # keys in the file only
    mismatched: tuple[str, ...] = ()  # names with different shapes
    notes: tuple[str, ...] = ()  # sentences on casts and the like

    @property
    def tensors(self) -> int:
        """The number of tensors that are loaded."""
        return len(self.state)

    def load(self) -> None:
        """Load the weights; raises CheckpointError if the model's own code refuses them."""
        if not self.state:
            return
        try:
            self.model.load_state_dict(dict(self.state), strict=False)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(f"the model refuses the checkpoint's weights: {reason}") from error


def plan_weights(
    model: nn.Module, weights: Mapping[str, torch.Tensor] | None, *, allow_partial: bool = False
) -> WeightPlan:
    """Match a file's keys to the model's, and check shapes as torch does; nothing is loaded yet.

    Wrappers' prefixes are removed on both sides, the model's own load hooks are applied, and a tied tensor is needed
    only once. Raises CheckpointError if keys or shapes differ, unless `allow_partial` is set.
    """
    if not weights:
        return WeightPlan(model=model)
    own = model.state_dict(keep_vars=True)
    clean = clean_tensor_names(model, own)
    to_own = {cleaned: key for key, cleaned in clean.items()}
    matched = match_keys(weights, to_own)
    renamed = {to_own.get(name, name): weights[key] for key, name in matched.items()}
    origin = {to_own.get(name, name): key for key, name in matched.items()}
    seen = _after_load_hooks(model, renamed)
    mismatched = [key for key in seen if key in own and not _shapes_fit(own[key], seen[key])]
    missing = _missing(model, own, seen)
    spare = {name for name, _ in model.named_buffers()} - set(own)  # buffers that the model does not save (any more)
    unexpected = [origin.get(key, key) for key in seen if key not in own and key not in spare]
    if (missing or unexpected or mismatched) and not allow_partial:
        shapes = {clean[key]: (_shape(seen[key]), _shape(own[key])) for key in mismatched}
        cleaned = [clean[key] for key in missing]
        raise CheckpointError(_refusal(cleaned, unexpected, shapes, file_keys=list(weights), own_keys=list(to_own)))
    # a key that a load hook will rename is not in the model yet: it is kept
    fits = {key: value for key, value in renamed.items() if key not in mismatched and (key in own or key not in seen)}
    return WeightPlan(
        model=model,
        state=fits,
        missing=tuple(clean[key] for key in missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(clean[key] for key in mismatched),
        notes=tuple(_cast_notes(own, fits)),
    )


def _after_load_hooks(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with the keys that the modules get: pre-hooks of `load_state_dict` rename older keys."""
    seen = dict(state)
    for name, module in model.named_modules():
        for hook in module._load_state_dict_pre_hooks.values():  # noqa: SLF001 torch has no public way to ask
            hook(seen, f"{name}." if name else "", {}, False, [], [], [])
    return seen


def _missing(model: nn.Module, own: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    loaded = {_place(own[key]) for key in seen if key in own}
    tolerated = ("num_batches_tracked", "_extra_state")  # as torch does for files without version information
    names = dict(model.named_modules(remove_duplicate=False))
    return [
        key
        for key in own
        if key not in seen
        and _place(own[key]) not in loaded
        and not (key.endswith(tolerated) and key.rpartition(".")[0] in names)
    ]


def _place(tensor: Any) -> object:
    """Returns a key for a tensor's memory, equal for tied names; a tensor without memory has its own key."""
    if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.device.type != "meta" and tensor.numel():
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None
    return id(tensor)


def _shapes_fit(own: Any, given: Any) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(given, torch.Tensor) or is_lazy(own):
        return True
    return own.shape == given.shape or (own.dim() == 0 and given.shape == (1,))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _refusal(
    missing: Sequence[str],
    unexpected: Sequence[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    file_keys: Sequence[str],
    own_keys: Sequence[str],
) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(own_keys)} tensors of the model are missing ({_some(missing)})")
    if unexpected:
        parts.append(f"{_count(len(unexpected), 'key', ' of the file')} unknown to the model ({_some(unexpected)})")
    if shapes:
        examples = [f"{name}: {file} in the file, {own} in the model" for name, (file, own) in shapes.items()]
        parts.append(f"{_count(len(shapes), 'shape')} different ({_some(examples, '; ')})")
    hint = _hint(missing, unexpected, file_keys, own_keys)
    return f"the checkpoint does not fit the model: {', '.join(parts)}{hint}; --allow-partial loads what fits"


def _count(number: int, noun: str, rest: str = "") -> str:
    return f"1 {noun}{rest} is" if number == 1 else f"{number} {noun}s{rest} are"


def _some(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}..." if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more


def _hint(missing: Sequence[str], unexpected: Sequence[str], file_keys: Sequence[str], own_keys: Sequence[str]) -> str:
    prefix = common_prefix_fit(file_keys, own_keys) if missing and unexpected else None
    if prefix is None:
        return ""
    change = f"with {prefix[1:]!r} put before the file's keys" if prefix[0] == "+" else f"without {prefix!r}"
    return f"; they fit {change}"


def _cast_notes(own: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[str]:
    casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    beyond = []
    for key, value in given.items():
        target = own.get(key)
        if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor) or value.dtype == target.dtype:
            continue
        casts[value.dtype, target.dtype] += 1
        if value.is_floating_point() and target.is_floating_point() and _loses_range(value, target.dtype):
            beyond.append(key)
    for (file_dtype, own_dtype), count in casts.items():
        yield f"{_count(count, 'tensor')} {_name(file_dtype)} in the file and {_name(own_dtype)} in the model: cast"
    if beyond:
        yield f"{_count(len(beyond), 'tensor')} beyond the range of the model's dtype and infinite now: {_some(beyond)}"


def _loses_range(value: torch.Tensor, dtype: torch.dtype) -> bool:
    if torch.finfo(value.dtype).max <= torch.finfo(dtype).max or not value.numel():
        return False
    return bool((value.detach().to(dtype).isfinite() != value.isfinite()).any())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
