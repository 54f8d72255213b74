"""What a manifest says of a model: how it is made again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ampdoctor.hooks.json_values import NotInertError, class_name, module_written, written
from ampdoctor.hooks.names import wrapped_as

Made = Callable[[nn.Module], Mapping[str, Any] | None]
"""Returns what is known of how a module was made: see `live.recording.construction`."""
HEADS: Mapping[str, tuple[str, str]] = {"trl:fused_lm_head": ("trl.trainer.utils", "add_fused_lm_head")}
"""Functions of libraries that give a model another forward, by the name that a manifest has for them."""


def described(model: nn.Module, made: Made) -> dict[str, Any]:
    """Returns how a model is made again, as a tree with a `kind`.

    "made": a class and its arguments; "transformers": a class of the library and a configuration; "peft": LoRA around
    one; "lightning": a class and its saved hyperparameters; "wrapped": in DDP or compiled; "several": models under
    names; "parts": what a module holds, where its arguments are not known or cannot be written; "function": it takes a
    function of the user's, and `why` says so.
    """
    cls = type(model)
    held = wrapped_as(model)
    if held is not None:
        return {"kind": "wrapped", "attribute": held, "module": described(getattr(model, held), made)}
    if cls is nn.Module:
        children = {name: described(child, made) for name, child in model.named_children()}
        return {"kind": "several", "children": children}
    try:
        library = _of_transformers(model) or _of_peft(model, made)
    except (NotInertError, AttributeError) as error:
        return _function(model, f"its configuration holds {error}")
    if library is not None:
        return library
    noted = made(model)
    if noted is not None and "why" not in noted:
        return {"kind": "made", "made": dict(noted)}
    parameters = getattr(model, "hparams", None)
    if isinstance(parameters, Mapping) and _is_lightning(cls):
        return _of_lightning(model, parameters)
    try:
        return _of_parts(model, made)
    except NotInertError:
        pass
    if noted is not None:
        return _function(model, f"it was made with {noted['why']}")
    if cls.__module__.startswith("torch."):
        return _function(model, "it is made of torch's own layers, and its structure stands in the script alone")
    return _function(model, "nobody saw it being made")


def code_of(said: Any) -> str | None:
    """What `--model` has to name for a model to be made again: a file, or a function of one; None for no code at all.

    Args:
        said: The manifest's entry; nothing in it is trusted.
    """
    said = said if isinstance(said, Mapping) else {}
    kind = said.get("kind")
    if kind == "several":
        children = said.get("children")
        parts = [code_of(child) for child in children.values()] if isinstance(children, Mapping) else []
        return next((part for part in parts if part is not None), None)
    if kind in ("wrapped", "peft"):
        return code_of(said.get("module"))
    if kind == "transformers" or (kind == "parts" and all(name.startswith("torch.") for name in _classes(said))):
        return None
    made = said.get("made", said)
    file = made.get("file") if isinstance(made, Mapping) else None
    file = file if isinstance(file, str) and file.endswith(".py") and file.isprintable() else "train.py"
    return file if kind in ("made", "lightning", "parts") else f"{file}:make_model"


def _classes(tree: Any) -> Iterator[str]:
    """The names of the classes in an entry."""
    if isinstance(tree, Mapping):
        yield from (value for key, value in tree.items() if key == "class" and isinstance(value, str))
    if isinstance(tree, Mapping | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _classes(part)


def _of_parts(model: nn.Module, made: Made) -> dict[str, Any]:
    def child(module: nn.Module) -> dict[str, Any]:
        said = described(module, made)
        if said["kind"] == "function":
            raise NotInertError(said["why"])
        return said

    return {"kind": "parts", "file": _file_of(type(model)), **module_written(model, child)}


def _of_lightning(model: nn.Module, parameters: Mapping[Any, Any]) -> dict[str, Any]:
    cls = type(model)
    try:
        saved = {str(name): written(value) for name, value in parameters.items()}
    except NotInertError as error:
        return _function(model, f"its hyperparameters hold {error}")
    return {"kind": "lightning", "class": class_name(cls), "file": _file_of(cls), "hparams": saved}


def _function(model: nn.Module, why: str) -> dict[str, Any]:
    cls = type(model)
    return {"kind": "function", "class": class_name(cls), "file": _file_of(cls), "why": why}


def _of_transformers(model: nn.Module) -> dict[str, Any] | None:
    library = sys.modules.get("transformers")
    base = getattr(library, "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return None
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.") or getattr(library, name, None) is not type(model):
        return None
    config: Any = model.config
    attention = getattr(config, "_attn_implementation", None)
    return {
        "kind": "transformers",
        "class": name,
        "config": written(config.to_dict()),
        "attention": attention if isinstance(attention, str) else None,
        "head": _head(model),
    }


def _head(model: nn.Module) -> dict[str, Any] | None:
    """Which of `HEADS` the model was given, and with what; None where its forward is its class's."""
    own = vars(model)
    forward = getattr(own.get("_original_forward", own.get("forward")), "__func__", None)  # Accelerate keeps the first
    for name, (module, function) in HEADS.items():
        giver = getattr(sys.modules.get(module), function, None)
        if forward is not None and giver is not None and forward.__code__ in giver.__code__.co_consts:
            kept = inspect.getclosurevars(forward).nonlocals
            taken = [key for key in list(inspect.signature(giver).parameters)[1:] if key in kept]
            return {"name": name, "arguments": {key: written(kept[key]) for key in taken}}
    return None


def _of_peft(model: nn.Module, made: Made) -> dict[str, Any] | None:
    library = sys.modules.get("peft")
    base = getattr(library, "PeftModel", None)
    if base is None or not isinstance(model, base):
        return None
    wrapped: Any = model
    adapters = dict(wrapped.peft_config)
    inner = wrapped.get_base_model()
    if len(adapters) != 1 or str(next(iter(adapters.values())).peft_type).rpartition(".")[2] != "LORA":
        return _function(model, "PEFT adapters other than one LoRA are not made again")
    (name, config), *_ = adapters.items()
    fields = {key: value for key, value in config.to_dict().items() if not callable(value)}
    return {"kind": "peft", "adapter": str(name), "config": written(fields), "module": described(inner, made)}


def _is_lightning(cls: type) -> bool:
    return any(base.__name__ == "LightningModule" for base in cls.__mro__)


def _file_of(cls: type) -> str | None:
    """The file that has a class; of torch's own layers that of the script, where they are put together."""
    module = "__main__" if cls.__module__.startswith("torch.") else cls.__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) else None
