"""Describes a model in a bundle's manifest, and builds it again from that and from the code that the user names."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn

from ampdoctor.errors import CheckpointError, FactoryError, ReplayError
from ampdoctor.hooks.json_values import (
    NOTHING,
    NotSerializableError,
    UnreadableTreeError,
    class_name,
    module_read,
    module_written,
    read,
    written,
)
from ampdoctor.hooks.names import wrapped_as
from ampdoctor.replay.bundles.classes import NamedCode, configuration, finding, library_of, lora_fields
from ampdoctor.replay.bundles.instructions import relative
from ampdoctor.replay.training_run import kind_of
from ampdoctor.replay.user_files import network_closed

# -- how the model is described --

Made = Callable[[nn.Module], Mapping[str, Any] | None]
"""Returns how a module was constructed, if that was recorded: see `live.recording.models`."""
HEADS: Mapping[str, tuple[str, str]] = {"trl:fused_lm_head": ("trl.trainer.utils", "add_fused_lm_head")}
"""Library functions that replace a model's forward, by their names in the manifest."""


def described(model: nn.Module, made: Made) -> dict[str, Any]:
    """Returns how a model can be built again, as a tree with a `kind`.

    "made": a class and its arguments; "transformers": a class of the library and a configuration; "peft": LoRA around
    another model; "lightning": a class and its saved hyperparameters; "wrapped": in DDP or compiled; "several": models
    by name; "parts": the contents of a module whose arguments are unknown or cannot be written; "function": only a
    function of the user's can build it, and `why` gives the reason.
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
    except (NotSerializableError, AttributeError) as error:
        return _function(model, f"its configuration holds {error}")
    if library is not None:
        return library
    noted = made(model)
    if noted is not None and "why" not in noted:
        file = noted.get("file")
        return {"kind": "made", "made": {**noted, "file": None if file is None else relative(file)}}
    parameters = getattr(model, "hparams", None)
    if isinstance(parameters, Mapping) and any(base.__name__ == "LightningModule" for base in cls.__mro__):
        return _of_lightning(model, parameters)
    try:
        return _of_parts(model, made)
    except NotSerializableError:
        pass
    if noted is not None:
        return _function(model, f"it was made with {noted['why']}")
    if cls.__module__.startswith("torch."):
        return _function(model, "it is made of torch's own layers, and its structure stands in the script alone")
    return _function(model, "nobody saw it being made")


def code_of(said: Any) -> str | None:
    """Returns what `--model` has to name: a file, or a function of one; None if no code is needed."""
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
    if isinstance(tree, Mapping):
        yield from (value for key, value in tree.items() if key == "class" and isinstance(value, str))
    if isinstance(tree, Mapping | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _classes(part)


def _of_parts(model: nn.Module, made: Made) -> dict[str, Any]:
    def child(module: nn.Module) -> dict[str, Any]:
        said = described(module, made)
        if said["kind"] == "function":
            raise NotSerializableError(said["why"])
        return said

    return {"kind": "parts", "file": _file_of(type(model)), **module_written(model, child)}


def _of_lightning(model: nn.Module, parameters: Mapping[Any, Any]) -> dict[str, Any]:
    cls = type(model)
    try:
        saved = {str(name): written(value) for name, value in parameters.items()}
    except NotSerializableError as error:
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
    own = vars(model)
    forward = getattr(own.get("_original_forward", own.get("forward")), "__func__", None)  # the first is Accelerate's
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


def _file_of(cls: type) -> str | None:
    """Returns the file that defines a class; for torch's own layers the script, which combines them."""
    module = "__main__" if cls.__module__.startswith("torch.") else cls.__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return relative(file) if isinstance(file, str) else None


T = TypeVar("T")

_DEEPEST = 20
_TORCHS = ("sdpa", "eager", "flex_attention")
"""Attention that needs only torch: any other name may load code from the hub, or a library's kernel."""


class ModelBuilder:
    """Builds models from a manifest."""

    def __init__(self, name: str, code: NamedCode | None, say: Callable[[str], None]) -> None:
        self._name = name
        self._code = code
        self._say = say
        self.find = finding(code)

    def give_globals(self, said: Any) -> None:
        """Set recorded globals in a script whose definitions alone were loaded; raises CheckpointError."""
        if self._code is None or said is None:
            return
        try:
            given = self._code.give({str(name): read(tree, self.find) for name, tree in said.items()})
        except (UnreadableTreeError, AttributeError) as error:
            raise CheckpointError(f"{self._name}: the entry of the globals is malformed ({error}).") from None
        if given:
            self._say(f"of the bundle: the script's {', '.join(given[:8])}{' and more' if len(given) > 8 else ''}")

    def model(self, said: Any) -> nn.Module:
        """Returns a fresh model with its constructor's weights; the entry `said` is not trusted."""
        try:
            return self._model(said, 0)
        except UnreadableTreeError as error:
            raise FactoryError(f"{self._name}: its model was made with {error}: {self._to_type(said)}") from None
        except (KeyError, IndexError) as error:
            raise CheckpointError(f"{self._name}: the entry of the model is malformed ({error!r}).") from None

    def _model(self, said: Any, depth: int) -> nn.Module:  # noqa: C901 - a table of kinds
        if not isinstance(said, dict) or depth > _DEEPEST:
            raise CheckpointError(f"{self._name}: the entry of the model is malformed.")
        kind = said["kind"]
        if kind == "wrapped":
            return _Passing(str(said["attribute"]), self._model(said["module"], depth + 1))
        named = None if self._code is None else self._code.named
        if named is not None and not isinstance(named, type):
            return self._by_function(named, said)
        if kind == "several":
            holder = nn.Module()
            for name, child in self._entry(said, "children", dict).items():
                holder.add_module(name, self._model(child, depth + 1))
            return holder
        if kind == "transformers":
            return self._of_transformers(said)
        if kind == "peft":
            return self._of_peft(said, depth)
        if kind == "made":
            return self._made(self._entry(said, "made", dict), said, depth)
        if kind == "parts":
            return module_read(
                said, self._class(said, {"kind": kind}), self.find, lambda one: self._model(one, depth + 1)
            )
        if kind == "lightning":
            cls, hparams = self._class(said, said), self._entry(said, "hparams", dict)
            return self._constructed(cls, [], {key: self._value(one, depth) for key, one in hparams.items()})
        if isinstance(named, type) and issubclass(named, nn.Module):
            return _checked(named(), self._name)
        raise FactoryError(f"{self._name} holds no code: {self._to_type(said)}")

    def _by_function(self, function: Any, said: Mapping[str, Any]) -> nn.Module:
        assert self._code is not None  # noqa: S101 for the type checker: it has named the function
        made = function()
        if said["kind"] == "several" and not isinstance(made, nn.Module):
            names = list(self._entry(said, "children", dict))
            models = dict(made) if isinstance(made, Mapping) else dict(zip(names, made, strict=False))
            if list(models) != names and set(models) != set(names):
                raise FactoryError(
                    f"--model {self._code.spec} makes {', '.join(map(str, models))}, and the bundle's models are "
                    f"{', '.join(names)}: return a dictionary of these"
                )
            holder = nn.Module()
            for name in names:
                holder.add_module(name, _checked(models[name], self._code.spec))
            return holder
        return _checked(made, f"--model {self._code.spec}")

    def _made(self, made: Mapping[str, Any], said: Mapping[str, Any], depth: int) -> nn.Module:
        cls = self._class(made, said)
        args = [self._value(one, depth) for one in self._entry(made, "args", list)]
        kwargs = {str(key): self._value(one, depth) for key, one in self._entry(made, "kwargs", dict).items()}
        try:
            return self._constructed(cls, args, kwargs)
        except NameError as error:
            if self._code is None or not self._code.trimmed:
                raise
            raise FactoryError(
                f"{cls.__qualname__} speaks of {error.name!r}, which {self._code.spec} makes as it trains and the "
                f"bundle does not hold: add a function that returns the model to that file, and name it: --model "
                f"FILE:make_model"
            ) from None

    def _constructed(self, cls: type[nn.Module], args: list[Any], kwargs: Mapping[str, Any]) -> nn.Module:
        """Calls the class's constructor, which is the user's code, or a library's that the manifest names."""
        library = cls.__module__.partition(".")[0] in ("torch", "transformers")
        with self._of_library(cls.__qualname__) if library else nullcontext():
            return _checked(cls(*args, **kwargs), self._name)

    def _entry(self, said: Mapping[str, Any], key: str, kind: type[T]) -> T:
        found = said[key]
        if not isinstance(found, kind):
            raise CheckpointError(f"{self._name}: the entry of the model is malformed ({key!r}).")
        return found

    def _fields(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return self._entry({"config": read(said["config"], self.find)}, "config", dict)

    def _value(self, tree: Any, depth: int) -> Any:
        def special(kind: str, part: Mapping[str, Any]) -> Any:
            if kind == "made":
                if depth > _DEEPEST:
                    raise UnreadableTreeError("modules that are nested too deeply")
                return self._model({"kind": "made", "made": part["made"]}, depth + 1)
            if kind == "config":
                module, _, name = part["class"].partition(":")
                cls = self.find(module, name)
                if not hasattr(cls, "from_dict"):
                    raise UnreadableTreeError(f"the configuration {name[:80]} of {module[:80]}, which is not there")
                fields = self._entry({"fields": read(part["fields"], self.find)}, "fields", dict)
                with self._of_library(name):
                    return configuration(cls, fields)
            return NOTHING

        return read(tree, self.find, special)

    def _class(self, made: Mapping[str, Any], said: Mapping[str, Any]) -> type[nn.Module]:
        """Returns the class that the manifest names, looked up in the code that the user names."""
        module, _, qualname = self._entry(made, "class", str).partition(":")
        named = None if self._code is None else self._code.named
        outermost = made is said or made is said.get("made")
        if isinstance(named, type) and issubclass(named, nn.Module) and outermost:
            return named
        found = self.find(module, qualname)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            if self._code is None:
                raise FactoryError(f"{self._name} holds no code: {self._to_type(said)}")
            raise FactoryError(
                f"the bundle's model is {qualname} of {module}, and --model {self._code.spec} has no such class: name "
                f"the file that has it, or a function that makes the model"
            )
        return found

    def _to_type(self, said: Any) -> str:
        said = said if isinstance(said, dict) else {}
        if said.get("kind") == "several":
            children = said.get("children")
            said = next(iter(children.values()), {}) if isinstance(children, dict) else {}
        said = said if isinstance(said, dict) else {}
        made = said.get("made")
        made = made if isinstance(made, dict) else said
        qualname = str(made.get("class", "")).rpartition(":")[2][:80] or "the model"
        add = f"its model is {qualname}; add --model {shlex.quote(code_of(said) or 'train.py')}"
        if said.get("kind") in ("made", "lightning", "parts"):
            return add
        why = f", as {said['why']}" if isinstance(said.get("why"), str) else ""
        return f"{add}, a function that returns it{why}"

    # -- libraries ---------------------------------------------------------------------------------------------------

    def _of_transformers(self, said: Mapping[str, Any]) -> nn.Module:
        library = library_of("transformers")
        if library is None:
            raise ReplayError(f"{self._name} needs transformers for its model {said['class']}: install it")
        cls = getattr(library, str(said["class"]), None)
        if not (isinstance(cls, type) and issubclass(cls, library.PreTrainedModel)):
            raise ReplayError(f"this transformers ({library.__version__}) has no model {said['class']!r}")
        fields = self._fields(said)
        if fields.get("quantization_config") is not None:
            raise ReplayError(f"{self._name}: the model's layers are quantised, which is not replayed elsewhere")
        with self._of_library(cls.__name__):
            config = configuration(cls.config_class, fields)  # type: ignore[attr-defined]
            attention = said.get("attention")
            if attention in _TORCHS:
                config._attn_implementation = attention  # noqa: SLF001 - it has no public name
            elif attention is not None:
                config._attn_implementation = "sdpa"  # noqa: SLF001 - the same
                self._say(
                    f"attention by {str(attention)[:40]!r} is not made for a bundle: torch's own computes the same, "
                    f"rounded otherwise"
                )
            made = _checked(cls(config), self._name)
        return self._with_head(made, said.get("head"))

    @contextmanager
    def _of_library(self, what: str) -> Iterator[None]:
        """Closes the network while a library builds a part; raises ReplayError if that part needs the network."""
        with network_closed() as asked:
            try:
                yield
            except (UnreadableTreeError, CheckpointError, FactoryError):
                raise
            except Exception as error:
                if not asked:
                    raise
                raise ReplayError(
                    f"{self._name}: making {what[:80]} asks for {asked[0]}, and nothing is fetched for a bundle: name "
                    f"a function that makes the model (--model FILE.py:make_model)"
                ) from error
        if asked:
            self._say(f"making {what[:80]} asked for {asked[0]}, which was refused: nothing is fetched for a bundle")

    def _with_head(self, model: nn.Module, said: Mapping[str, Any] | None) -> nn.Module:
        if said is None:
            return model
        if not isinstance(said, dict) or self._entry(said, "name", str) not in HEADS:
            raise ReplayError(f"{self._name}: its model's forward is {str(said['name'])[:80]}, which is not known here")
        module, function = HEADS[said["name"]]
        library = library_of(module)
        if library is None:
            name = module.partition(".")[0]
            raise ReplayError(f"{self._name} needs {name}, which has given its model another forward: install it")
        giver = getattr(library, function, None)
        if giver is None:
            raise ReplayError(f"{self._name}: this {module} has no {function}, which has made its model's forward")
        arguments = self._entry(said, "arguments", dict)
        given = {str(key): read(one, self.find) for key, one in arguments.items()}
        with self._of_library(f"the forward {said['name']}"):
            giver(model, **given)
        return model

    def _of_peft(self, said: Mapping[str, Any], depth: int) -> nn.Module:
        library = library_of("peft")
        if library is None:
            raise ReplayError(f"{self._name} needs peft for its adapters: install it")
        fields = self._fields(said)
        known = library.LoraConfig.__dataclass_fields__
        inner = self._model(said["module"], depth + 1)
        with self._of_library("the adapter"):
            config = library.LoraConfig(**{key: one for key, one in lora_fields(fields).items() if key in known})
            return _checked(library.get_peft_model(inner, config, adapter_name=said["adapter"]), self._name)


class _Passing(nn.Module):
    """Replaces a wrapper (DDP, a compiled model): it has the module under the same name, and only calls it."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        self._attribute = attribute
        self.add_module(attribute, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self._attribute)(*args, **kwargs)


def _checked(made: Any, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise FactoryError(f"{name} makes {kind_of(made)}, not a model")
    return made
