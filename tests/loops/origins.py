"""Finds by hand, as it were, where the first non-finite numbers of a bare script come from.

    python tests/loops/origins.py --from 190 --policy cuda fixtures/loops/gan.py --niter 1

A dispatch mode of its own looks at each op: finite operands and a result that is not are an origin. Nothing of
ampdoctor is asked but the machine that the script runs on. An origin need not harm (a mask of -inf that softmax
absorbs), which is why the steps that a scaler skipped are printed beside them: whoever reads both decides.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch.nn.modules import module as hooks  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.loops.bare import Watched, as_main, watching  # noqa: E402
from tests.loops.recorder import machine  # noqa: E402

UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.set_", "aten.resize_")
"""Ops whose result is whatever memory held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """An op that makes a non-finite number of finite ones."""

    attempted: tuple[int, ...]  # how often each optimizer was to step before, in order of first steps
    phase: str  # "data", "forward", "loss", "backward", "scaler" or "optimizer"
    module: str  # the innermost that it ran in, or whose backward it is; "" outside all, or in the outermost one
    op: str  # as torch calls it
    node: str  # the backward's
    line: str  # the script's; of a backward that of the forward
    inner: str  # the innermost line of all outside torch, where a library stands between
    result: str  # shape and dtype of what it made, and how many of its numbers are NaN and infinite


@dataclass(slots=True)
class Modules:
    """The modules that run, by the names that the outermost gives them, and the backward nodes that each made."""

    names: dict[int, str] = field(default_factory=dict)
    running: list[tuple[torch.nn.Module, int]] = field(default_factory=list)
    made: list[tuple[int, int, str]] = field(default_factory=list)

    def enter(self, module: torch.nn.Module, _inputs: object) -> None:
        if not self.running:
            self.made.clear()
            self.names.update({id(part): name for name, part in module.named_modules()})
        self.running.append((module, torch._C._autograd._get_sequence_nr()))

    def leave(self, module: torch.nn.Module, _inputs: object, _output: object) -> None:
        while self.running:
            left, first = self.running.pop()
            if left is module:
                self.made.append((first, torch._C._autograd._get_sequence_nr(), self.name(module)))
                return

    def name(self, module: torch.nn.Module) -> str:
        return self.names.get(id(module), type(module).__name__)

    @property
    def now(self) -> str:
        return self.name(self.running[-1][0]) if self.running else ""

    def of(self, sequence: int) -> str:
        """The innermost module whose forward made the node of a number; the inner end first."""
        return next((name for first, end, name in self.made if first <= sequence < end), "")


class Midwife(TorchDispatchMode):
    """Looks at every op."""

    def __init__(self, watched: Watched, modules: Modules, script: str, first: int):
        super().__init__()
        self.watched, self.modules, self.script, self.first = watched, modules, script, first
        self.origins: list[Birth] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        late = max(self.watched.attempted, default=0) >= self.first
        torch.autograd.set_detect_anomaly(late, check_nan=False)  # its nodes keep the line of their forward
        given = tree_leaves((args, kwargs))
        before = finite(given) if late and func._schema.is_mutable else None
        result = func(*args, **kwargs)
        made = late and not str(func).startswith(UNWRITTEN) and not finite(tree_leaves(result))
        if made and (finite(given) if before is None else before):
            self.origins.append(self.origin(func, result))
        return result

    def origin(self, func, result) -> Birth:
        node = torch._C._current_autograd_node()
        frames, files = [], set()
        frame = sys._getframe(2)
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        said = [f"{Path(file).name}:{line}" for file, line in frames if file == self.script]
        inner = [
            f"{file}:{line}" for file, line in frames if not any(part in file for part in ("/torch/", "origins.py"))
        ]
        phase, module = ("forward" if self.modules.running else "loss"), self.modules.now
        if any("torch/utils/data" in file for file in files):
            phase = "data"
        elif any("grad_scaler" in file for file in files):
            phase = "scaler"
        elif any("torch/optim" in file for file in files):
            phase = "optimizer"
        elif node is not None:
            phase, module = "backward", self.modules.of(node._sequence_nr())
            traced = "".join(node.metadata.get("traceback_", ())).split("\n")
            traced = [line.strip() for line in reversed(traced) if line.strip().startswith("File")]
            said = [line for line in traced if self.script in line]
            inner = [line for line in traced if "/torch/" not in line]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        worst = next(leaf for leaf in made if not leaf.isfinite().all())
        kinds = f"{int(worst.isnan().sum())} NaN, {int(worst.isinf().sum())} inf"
        return Birth(
            attempted=tuple(self.watched.attempted),
            phase=phase,
            module=module,
            op=str(func),
            node="" if node is None else node.name(),
            line=said[0] if said else "",
            inner=inner[0] if inner else "",
            result=f"{tuple(worst.shape)} {worst.dtype}: {kinds}",
        )


def finite(leaves) -> bool:
    """Whether all numbers and tensors among the leaves are."""
    numbers = all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return numbers and all(bool(tensor.isfinite().all()) for tensor in tensors)


def births_of(script: str, arguments: list[str], policy: str, first: int) -> tuple[list[Birth], Watched]:
    """Run a script bare, and return the origins from an attempted step on."""
    modules = Modules()
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine(policy))
        watched = stack.enter_context(watching())
        for handle in (
            hooks.register_module_forward_pre_hook(modules.enter),
            hooks.register_module_forward_hook(modules.leave, always_call=True),
        ):
            stack.callback(handle.remove)
        midwife = stack.enter_context(Midwife(watched, modules, script, first))
        as_main(script, arguments)
    torch.autograd.set_detect_anomaly(False)
    return midwife.origins, watched


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--policy", choices=("cuda", "native"), default="cuda")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first attempted step that is looked at")
    parser.add_argument("--most", type=int, default=6, help="so many origins are printed")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    script = str(Path(asked.script).absolute())
    origins, watched = births_of(script, asked.arguments, asked.policy, asked.first)
    for origin in origins[: asked.most]:
        print(origin, file=sys.stderr)  # noqa: T201
    print(f"skipped {watched.skipped} of {watched.attempted}; {len(origins)} origins", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
