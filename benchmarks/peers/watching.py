"""What a training step costs under each peer: who can be attached to a step, and how.

"Sees" says where a tool looks: f at what the forward makes, b at what the backward makes (gradients of activations, or
of parameters alone), w at the weights.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.peers.op_modes import Bad, FirstBadOp, has_nan, not_finite


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """What the loop trains while a tool watches.

    Attributes:
        model: The model, or the tool's version of it.
        optimizer: The optimizer, or the tool's wrapper.
        after: Called with the loss after the backward, where the tool asks for it.
    """

    model: nn.Module
    optimizer: Any
    after: Callable[[torch.Tensor], object] | None = None


Attach = Callable[[nn.Module, Any], AbstractContextManager[Watched]]


@dataclass(frozen=True, slots=True)
class Watcher:
    """A contender.

    Attributes:
        title: Its name in the table.
        sees: Where it looks.
        attach: Attaches it to a model and its optimizer.
        needs: The module that must be installed; "" for none.
    """

    title: str
    sees: str
    attach: Attach
    needs: str = ""

    def missing(self) -> str | None:
        """Say why it cannot take part; None where it can."""
        try:
            if self.needs:
                importlib.import_module(self.needs)
        except Exception as error:  # noqa: BLE001  # a tool that does not import is said, and left out
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None


@dataclass(frozen=True, slots=True)
class OnCopy:
    """For tools that cannot be taken off again: a copy of the model, with an optimizer of its own, made once.

    Attributes:
        prepare: Attaches the tool to the copy for good.
    """

    prepare: Callable[[nn.Module, Any], Watched]
    _kept: WeakKeyDictionary[nn.Module, Watched] = field(default_factory=WeakKeyDictionary)

    @contextmanager
    def __call__(self, model: nn.Module, optimizer: Any) -> Iterator[Watched]:
        """Give the copy of this model."""
        if model not in self._kept:
            twin = copy.deepcopy(model)
            self._kept[model] = self.prepare(twin, like(optimizer, twin))
        yield self._kept[model]


def like(optimizer: Any, model: nn.Module) -> Any:
    """Return an optimizer of the same kind and settings for another model."""
    taken = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return type(optimizer)(model.parameters(), **settings)


def without_backward_hooks(model: nn.Module) -> None:
    """Let go of the kind of backward hook: torch keeps it when the hook is removed, and refuses the other kind."""
    for module in model.modules():
        if not module._backward_hooks:  # noqa: SLF001
            module._is_full_backward_hook = None  # noqa: SLF001


def _underflow_overflow(model: nn.Module, optimizer: Any) -> Watched:
    importlib.import_module("transformers.debug_utils").DebugUnderflowOverflow(model, max_frames_to_save=1)
    return Watched(model, optimizer)


def _track_scales(model: nn.Module, optimizer: Any) -> Watched:
    tracked = importlib.import_module("unit_scaling.transforms").track_scales(model)
    return Watched(tracked, like(optimizer, tracked))


@contextmanager
def _anomaly(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    with torch.autograd.set_detect_anomaly(True):
        yield Watched(model, optimizer)


def _mode(bad: Bad) -> Attach:
    @contextmanager
    def attach(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
        with FirstBadOp(bad):
            yield Watched(model, optimizer)

    return attach


@contextmanager
def _debug_mode(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    debug_mode = importlib.import_module("torch.utils._debug_mode").DebugMode

    def finite(_func: Any, _types: Any, _args: Any, _kwargs: Any, result: Any) -> dict[str, bool]:
        return {"finite": all(bool(leaf.isfinite().all()) for leaf in _floating(result))}

    with debug_mode(), debug_mode.dispatch_hooks(record_hook=finite):
        yield Watched(model, optimizer)


@contextmanager
def _sherlorch(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    with importlib.import_module("sherlorch").trace() as tracker:
        tracker.watch(model)
        yield Watched(model, optimizer, tracker.has_issue)


@contextmanager
def _stabilityguard(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    guard = importlib.import_module("stabilityguard").GuardedOptimizer(optimizer, model, verbose=False)
    try:
        yield Watched(model, guard)
    finally:
        guard.close()


@contextmanager
def _tracetorch(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    with importlib.import_module("tracetorch").TraceSession(model):
        yield Watched(model, optimizer)


@contextmanager
def _neuraldbg(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    with importlib.import_module("neuraldbg").NeuralDbg(model) as debugger:
        yield Watched(model, optimizer, lambda loss: debugger.record_loss(loss.item()))


@contextmanager
def _nan_detector(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    with importlib.import_module("fairseq_nan_detector").NanDetector(model):
        yield Watched(model, optimizer)


@contextmanager
def _plain_hooks(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    found: list[bool] = []
    with _leaf_hooks(model, lambda _name, tensor: found.append(bool(tensor.isfinite().all()))):
        yield Watched(model, optimizer, lambda _loss: all(found))


@contextmanager
def _one_sync(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    sums: list[torch.Tensor] = []
    with _leaf_hooks(model, lambda _name, tensor: sums.append(tensor.sum(dtype=torch.float32))):
        yield Watched(model, optimizer, lambda _loss: bool(torch.stack(sums).isfinite().all()))


Look = Callable[[str, torch.Tensor], object]


@contextmanager
def _leaf_hooks(model: nn.Module, look: Look) -> Iterator[None]:
    """Look at each leaf module's outputs, and at their gradients."""

    def hook(name: str) -> Any:
        def outputs(_module: nn.Module, _inputs: Any, result: Any) -> None:
            for tensor in _floating(result):
                look(name, tensor.detach())
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: (look(name, gradient), None)[1])

        return outputs

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(hook(name)).remove)
        yield


def _floating(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


_INSPECTED = """
all:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  LogTensorStats:
    enabled: True
    tensors: [activation, gradient]
    stats: [min, max, mean, std]
"""


@contextmanager
def _inspect(model: nn.Module, optimizer: Any) -> Iterator[Watched]:
    api = importlib.import_module("nvdlfw_inspect.api")
    with open("inspect.yaml", "w", encoding="utf-8") as config:  # noqa: PTH123
        config.write(_INSPECTED)
    api.initialize(config_file="inspect.yaml", log_dir=".")

    def logged(tensor_name: str) -> Look:
        return lambda name, tensor: api.log_tensor_stats(
            name, tensor=tensor, tensor_name=tensor_name, skip_reduction=True
        )

    def backward(name: str) -> Any:
        look = logged("gradient")
        return lambda _module, _inputs, outputs: [look(name, each) for each in _floating(outputs)] and None

    def forward(name: str) -> Any:
        look = logged("activation")
        return lambda _module, _inputs, outputs: [look(name, each) for each in _floating(outputs)] and None

    with ExitStack() as stack:
        stack.callback(api.end_debug)
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(forward(name)).remove)
                stack.callback(module.register_full_backward_hook(backward(name)).remove)
        yield Watched(model, optimizer, lambda _loss: api.step())


def trainer_mon(model: nn.Module, optimizer: Any) -> Watched:
    """Attach msprobe's monitor of weight gradients, for good; it writes into the working folder."""
    with open("monitor.json", "w", encoding="utf-8") as config:  # noqa: PTH123
        config.write('{"targets": {}, "wg_distribution": true, "format": "csv", "ops": ["norm", "min", "max", "nans"]}')
    monitor = importlib.import_module("msprobe.pytorch").TrainerMon(
        config_file_path="monitor.json", params_have_main_grad=False
    )
    monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)
    return Watched(model, optimizer)


FLOOR = "plain hooks, a sum each, one sync"
"""No peer but a floor: it says that something is wrong somewhere, and no more."""

WATCHERS = (
    Watcher("torch set_detect_anomaly", "b", _anomaly),
    Watcher("transformers DebugUnderflowOverflow", "f+w", OnCopy(_underflow_overflow), "transformers.debug_utils"),
    Watcher("dispatch mode, isfinite of every op", "f+b", _mode(not_finite)),
    Watcher("dispatch mode, isnan of every op", "f+b", _mode(has_nan)),
    Watcher("torch DebugMode, isfinite of every op", "f+b", _debug_mode, "torch.utils._debug_mode"),
    Watcher("plain hooks, isfinite each", "f+b", _plain_hooks),
    Watcher("sherlorch", "f", _sherlorch, "sherlorch"),
    Watcher("stabilityguard GuardedOptimizer", "b", _stabilityguard, "stabilityguard"),
    Watcher("tracetorch-ml TraceSession", "f+b", _tracetorch, "tracetorch"),
    Watcher("neuraldbg", "f+b", _neuraldbg, "neuraldbg"),
    Watcher("nvdlfw-inspect LogTensorStats", "f+b", _inspect, "nvdlfw_inspect.api"),
    Watcher("unit-scaling track_scales", "f+b", OnCopy(_track_scales), "unit_scaling.transforms"),
    Watcher("fairseq NanDetector", "f+b", _nan_detector, "fairseq_nan_detector"),
    Watcher("msprobe TrainerMon, weight gradients", "b", OnCopy(trainer_mon), "msprobe.pytorch"),
    Watcher(FLOOR, "f+b", _one_sync),
)
