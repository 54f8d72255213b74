"""Replacements for libraries that the user's own code imports and that are not installed.

Only an import finds them. `importlib.util.find_spec` still reports such a library as missing: transformers would
otherwise go on to functions that only the library has.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from ampdoctor.precision.fake_gpu import fused_attention
from ampdoctor.precision.fake_gpu.replace import Patches, Replacements, imported_by_user

# -- libraries that need a GPU, and their replacements --

_SDPA: Final = "scaled_dot_product_attention"
_FLASH: Final = {
    name: (_SDPA, getattr(fused_attention, name))
    for name in (
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
    )
}

STAND_INS: Final[Mapping[str, Mapping[str, tuple[str, Any]]]] = {
    "flash_attn": _FLASH,
    "flash_attn.flash_attn_interface": _FLASH,
    "flash_attn.bert_padding": {
        name: ("", getattr(fused_attention, name)) for name in ("unpad_input", "pad_input", "index_first_axis")
    },
}  # by module: each available name, with torch's counterpart for the note ("": no note) and the replacement

INSTEAD: Final[Mapping[str, str]] = {
    "apex": "torch.amp, and torch's own optimizers, layers and DistributedDataParallel",
    "bitsandbytes": "torch.optim.AdamW and plain linear layers",
    "causal_conv1d": "torch.nn.functional.conv1d",
    "deepspeed": "the model and its optimizer without the engine",
    "flash_attn": f"torch.nn.functional.{_SDPA} (transformers: attn_implementation='sdpa')",
    "mamba_ssm": "the model's own path without it",
    "transformer_engine": "layers of torch's under torch.autocast",
    "triton": "the same function written with torch",
    "xformers": f"torch.nn.functional.{_SDPA}, or a layer of torch's",
}  # libraries without replacement, and what the user's code may use instead


def explain_missing(error: ImportError) -> str | None:
    """The sentence for an import (or a library's error about one) that failed because it needs a GPU; else None."""
    library = (error.name or "").partition(".")[0] or next((name for name in INSTEAD if name in str(error)), "")
    if library not in INSTEAD:
        return None
    return f"{library} needs a GPU and is not here: let the code take {INSTEAD[library]} where it is missing"


class _Module(ModuleType):
    """A module that notes each name when it is used."""

    def __init__(self, name: str, note: Callable[[str], None], below: Callable[[str], ModuleType]) -> None:
        super().__init__(name)
        self.__dict__.update(_note=note, _below=below, __path__=[], __all__=list(STAND_INS[name]), __version__="0")

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in STAND_INS:
            return self._below(f"{self.__name__}.{name}")
        if name not in STAND_INS[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        torchs, stand_in = STAND_INS[self.__name__][name]
        library = self.__name__.partition(".")[0]
        if torchs:
            self._note(f"{library} is not installed: {torchs} stands in for {name}.")
        return stand_in


class StandIns:
    """A finder of modules, and its own loader; `note` is called with the note on each name that is used."""

    __slots__ = ("_modules", "_note")

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._modules: dict[str, ModuleType] = {}

    def declare(self, replacements: Replacements) -> None:
        replacements.want(importlib.util, "find_spec", self._truth)

    def install(self, patches: Patches) -> None:
        sys.meta_path.append(self)
        patches.callback(self._remove)

    def _remove(self) -> None:
        sys.meta_path.remove(self)
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a replacement, for an import by the user's code."""
        parent = name.rpartition(".")[0]
        missing = name in STAND_INS and (not parent or parent in self._modules)
        if not missing or not imported_by_user(sys._getframe(1)):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            self._modules[name] = _Module(name, self._note, self._module)
        return self._modules[name]

    def _truth(self, original: Any) -> Any:
        @functools.wraps(original)
        def find_spec(name: str, package: str | None = None) -> Any:
            module = self._modules.get(name)
            if module is not None and sys.modules.get(name) is module:
                return None
            return original(name, package)

        return find_spec
