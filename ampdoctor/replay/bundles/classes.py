"""The classes that a bundle may name, the code that `--model` names, and the keys that a configuration may have."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import FactoryError
from ampdoctor.package import working_folder
from ampdoctor.replay.user_code import user_code
from ampdoctor.replay.user_files import forbid_training_and_writes
from ampdoctor.replay.user_modules import Spec, load_object

# -- the user's code: a function, a class, or a file in which the bundle's class is looked up --
#
# A script that trains on import is not imported: only its imports, functions, classes and simple constants are run.

_LONGEST = 5_000_000
_PURE = frozenset(
    {
        *("dict", "list", "tuple", "set", "frozenset", "int", "float", "str", "bool", "len", "min", "max", "range"),
        *("sum", "abs"),
    }
)
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


class NamedCode:
    """Loads what `--model` names (`spec`); nothing in a bundle decides what is imported."""

    def __init__(self, spec: str, app_dir: str | None = None) -> None:
        self.spec = spec
        self.notes: list[str] = []  # differences from an import, as sentences
        self.named: Any = None  # the object that the user named; None for a file alone
        alone = spec.strip().endswith(".py")
        parsed = Spec.parse(f"{spec.strip()}:__name__" if alone else spec)
        self.path = parsed.search_path(app_dir)
        self.argv0 = parsed.argv0
        tree = _parsed(parsed.file) if parsed.file is not None else None
        self.trimmed = tree is not None and not all(map(_is_quiet, tree.body))  # only the file's definitions are run
        if parsed.file is not None and tree is not None and self.trimmed:
            self._module = self._trimmed(parsed.file, tree)
            self.named = None if alone else _walked(self._module, parsed.attribute)
            if self.named is None and not alone:
                raise FactoryError(f"--model {spec}: the definitions of {self.argv0} have no {parsed.attribute!r}")
        else:
            found = load_object(parsed, path=self.path, what="the model", reuse=True)
            name = found if alone else getattr(found, "__module__", "")
            self._module = sys.modules[name] if name in sys.modules else ModuleType("none")
            if not alone:
                self.named = found
                self._module = _module_of(parsed) or self._module

    def give(self, values: Mapping[str, Any]) -> list[str]:
        """Set those globals that a trimmed file lacks; returns their names. Globals that it has are not changed."""
        if not self.trimmed:
            return []
        lacking = [name for name in values if not hasattr(builtins, name) and name not in vars(self._module)]
        vars(self._module).update((name, values[name]) for name in lacking)
        return lacking

    def find(self, module: str, qualname: str) -> Any:
        """Returns a class of the code, or of a module that it has imported from its own folders."""
        for place in (self._module, sys.modules.get(module)):
            found = None if place is None else _walked(place, qualname)
            if isinstance(found, type) and found.__qualname__ == qualname and self._is_users(found):
                return found
        return None

    def _is_users(self, cls: type) -> bool:
        """Is a class defined in the user's own files? A bundle may not name classes that these files import."""
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if not isinstance(file, str) or "site-packages" in Path(file).parts:
            return False
        resolved = Path(file).resolve()
        return any(resolved.is_relative_to(folder) for folder in self.path)

    def _trimmed(self, file: Path, tree: ast.Module) -> ModuleType:
        module = ModuleType(f"{file.stem}_definitions_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        importing = f"importing the definitions of {file.name}"
        entered = user_code(self.argv0, what=importing, path=self.path)
        with entered, forbid_training_and_writes(importing, (working_folder(), *self.path), imports=True):
            for node in tree.body:
                if not _is_quiet(node) or (isinstance(node, ast.If) and _is_guard(node)):
                    continue
                piece = ast.Module(body=[node], type_ignores=[])
                try:
                    exec(compile(piece, str(file), "exec"), vars(module))  # noqa: S102 - a file that the user names
                except NameError:
                    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.If):  # it needs a value of the training
                        raise
        self.notes.append(
            f"{file.name} does more than define things when it is imported: its imports, functions, classes and simple "
            f"constants alone were taken"
        )
        return module


def _module_of(spec: Spec) -> ModuleType | None:
    if spec.file is None:
        return sys.modules.get(spec.module)
    found = (m for m in list(sys.modules.values()) if isinstance(getattr(m, "__file__", None), str))
    return next((m for m in found if m.__file__ == str(spec.file)), None)


def _walked(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = vars(value).get(part) if isinstance(value, ModuleType | type) else None
        if value is None:
            return None
    return value


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes(), str(file)) if file.stat().st_size <= _LONGEST else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the import raises, with the reason


def _is_quiet(node: ast.stmt) -> bool:
    if isinstance(node, _DEFINITIONS):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return node.value is None or _is_simple(node.value)
    if isinstance(node, ast.If):
        return _is_guard(node) or (_is_simple(node.test) and all(map(_is_quiet, [*node.body, *node.orelse])))
    if isinstance(node, ast.Try):
        handlers = [one for handler in node.handlers for one in handler.body]
        return all(map(_is_quiet, [*node.body, *node.orelse, *node.finalbody, *handlers]))
    return False


def _is_guard(node: ast.If) -> bool:
    return "__name__" in ast.unparse(node.test) and not node.orelse


def _is_simple(value: ast.expr) -> bool:
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
    return all(isinstance(call.func, ast.Name) and call.func.id in _PURE for call in calls)


_OF_TRANSFORMERS = ("transformers.modeling_outputs", "transformers.tokenization_utils_base")
"""Modules with plain data classes that the library does not export at its top level."""

_ACTS = re.compile(
    r"\w*_implementation(_internal)?|(use|allow_all)_kernels?|kernels?_config|auto_map|custom_pipelines?|\w*remote_code"
    r"|\w*quantization_config|(use_)?pretrained(_\w+)?|hub_\w+|hf_\w+|(code_)?revision|_?commit_hash|token"
    r"|use_auth_token"
)
"""Keys of a configuration, at any depth, with which a library loads or fetches code and weights."""
_NAMES = re.compile(r"\w*(name_or_path|path|_file|_dir|_url|_uri|_repo|_repo_id|kernels?|kernel_mapping)")
"""Keys that do so if their value is a name; with a number or a switch they describe the architecture."""
_ADDRESS = re.compile(r"(hf[-_]hub|local[-_]dir):|[a-z0-9+.-]+://", re.IGNORECASE)
"""Prefixes of values that name a place on the hub, the network or the disk: timm's spellings, and URLs."""
_OF_LORA = frozenset(
    {
        *("alora_invocation_tokens", "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("layer_replication", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout"),
        *("modules_to_save", "qalora_group_size", "r", "rank_pattern", "target_modules", "target_parameters"),
        *("task_type", "trainable_token_indices", "use_dora", "use_qalora", "use_rslora"),
    }
)
"""Settings of LoRA that say which layers it has and how they compute. The others are refused: `megatron_core` imports a
module by name, some read files, and some compute initial values, which the bundle's weights replace."""
_DEEPEST = 20


def finding(code: NamedCode | None) -> Callable[[str, str], Any]:
    """Returns a function that finds a class by module and qualified name; it returns None for refused classes."""

    def find(module: str, qualname: str) -> Any:
        top = module.partition(".")[0]
        if top == "torch":
            return _of_torch(module, qualname)
        if top == "transformers":
            return _of_transformers(module, qualname)
        return None if code is None else code.find(module, qualname)

    return find


def _of_torch(module: str, qualname: str) -> Any:
    found = vars(sys.modules.get(module, torch)).get(qualname)
    if not isinstance(found, type) or found.__module__ != module:
        return None
    if not module.startswith(("torch.nn.", "torch.ao.nn.")):  # other modules compile, or start processes
        return None
    return found if issubclass(found, nn.Module | nn.utils.rnn.PackedSequence) else None


def _of_transformers(module: str, qualname: str) -> Any:
    library = library_of("transformers")
    if library is None or not qualname.isidentifier():
        return None
    places = [library, *(importlib.import_module(module) for one in _OF_TRANSFORMERS if one == module)]
    for place in places:
        found = getattr(place, qualname, None)
        if isinstance(found, type) and found.__module__ == module and _is_data(found, library):
            return found
    return None


def _is_data(cls: type, library: Any) -> bool:
    configuration = library.PreTrainedConfig if hasattr(library, "PreTrainedConfig") else library.PretrainedConfig
    return dataclasses.is_dataclass(cls) or issubclass(cls, Mapping | enum.Enum | nn.Module | configuration)


def library_of(name: str) -> Any:
    """Returns an installed library; None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def inert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a transformers configuration (untrusted) without those that load or fetch anything."""
    kept: dict[str, Any] = _inert(fields, 0)
    return kept


def _inert(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return {key: _inert(one, depth + 1) for key, one in value.items() if not _acts(key, one, value)}
    if isinstance(value, list | tuple):
        return type(value)(_inert(one, depth + 1) for one in value) if type(value) in (list, tuple) else None
    return value


def _acts(key: Any, value: Any, beside: Mapping[Any, Any]) -> bool:
    """Does a library load or fetch something because of this key and value? A number only shapes layers."""
    if isinstance(value, str) and _ADDRESS.match(value):
        return True
    if not isinstance(key, str) or value is None:
        return False
    if key == "backbone":  # a model's name: timm's are built here, the hub's are fetched
        return not (isinstance(value, str) and "/" not in value and beside.get("use_timm_backbone") is True)
    return bool(_ACTS.fullmatch(key) or (isinstance(value, str | Mapping) and _NAMES.fullmatch(key)))


def configuration(cls: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a transformers configuration that loads and fetches nothing; `fields` are as in `inert_fields`."""
    config = cls.from_dict(inert_fields(fields))
    for part in _configurations(config, 0):
        if getattr(part, "use_pretrained_backbone", False):  # some classes' default before transformers 5
            part.use_pretrained_backbone = False
    return config


def _configurations(config: Any, depth: int) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(type(value), "model_type") and depth < _DEEPEST:
            yield from _configurations(value, depth + 1)


def lora_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of a LoRA configuration that a bundle may set."""
    return {key: value for key, value in fields.items() if key in _OF_LORA}
