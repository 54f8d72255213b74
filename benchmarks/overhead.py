"""What watching costs: a training step with the non-finite probe against the same step without it.

Run: python benchmarks/overhead.py [--repeats 7] [--precision fp32] [--peers] [--parts]

The model is a 12-block transformer language model, d = 512, AdamW. Three contenders take the same step on the same
model and batch: a hand-written loop, the replay engine's bare step, and the engine's step with `NonFiniteProbe`
attached. Each repeat times all of them one after the other, in turning order, so that a busy neighbour slows all of
them; what is printed are medians, and ratios are medians of the ratios within a repeat. Times are CPU seconds of the
process, with one thread: threads that wait for each other while a neighbour holds a core burn CPU seconds too.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor import TrainingRun
from ampdoctor.precision import autocast_policy
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.replay.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOP, BARE, PROBED = "hand-written loop", "bare step", "probed step"
ANOMALY, HOOKS, DISPATCH = "loop, set_detect_anomaly", "loop, DebugUnderflowOverflow", "loop, isfinite of every op"
PEERS = (ANOMALY, HOOKS, DISPATCH)
TARGET = 1.15
"""Of the probed step against the bare one."""


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, *, blocks: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) of ids to (batch, tokens, vocabulary) of logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def make_run(
    *, precision: str, blocks: int = 12, width: int = 512, batch: int = 2, context: int = 256, vocabulary: int = 8192
) -> TrainingRun:
    """The run that is measured."""
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (batch, context + 1))
    return TrainingRun(
        model=Transformer(blocks=blocks, width=width, vocabulary=vocabulary, context=context),
        batches=[ids],
        loss=language_model_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        precision=precision,
        scaler={} if precision == "fp16" else None,
    )


def language_model_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def hand_written(session: Session) -> float:
    """Take the step as a user's own loop takes it, and read the loss once."""
    optimizer = session.optimizers["optimizer"]
    optimizer.zero_grad(set_to_none=True)
    with session.precision.context("cpu")():
        loss = language_model_loss(session.model, session.tape[0])
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()
    return loss.item()


class FiniteEveryOp(TorchDispatchMode):
    """What is usually written by hand: ask `isfinite` of every op's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then look at what came out."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                self.first = self.first or str(func)
        return out


@contextmanager
def debug_underflow_overflow(model: nn.Module) -> Iterator[None]:
    """Attach transformers' debugger; it has no way to detach, so the model's hooks are put back."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: dict(module._forward_hooks) for module in model.modules()}  # noqa: SLF001
    DebugUnderflowOverflow(model, max_frames_to_save=1)
    try:
        yield
    finally:
        for module, hooks in before.items():
            module._forward_hooks.clear()  # noqa: SLF001
            module._forward_hooks.update(hooks)  # noqa: SLF001


class Contest:
    """Times the contenders on one session."""

    def __init__(self, session: Session, *, peers: bool) -> None:
        self.session = session
        self.probe = NonFiniteProbe()
        self.names = (LOOP, BARE, PROBED, *(PEERS if peers else ()))
        self.times: dict[str, list[float]] = {name: [] for name in self.names}

    def take(self, name: str) -> float:
        """Take one step and return its CPU seconds; attaching hooks is once a run, not once a step, and not timed."""
        with ExitStack() as stack:
            work: Callable[[], object] = partial(hand_written, self.session)
            if name in {BARE, PROBED}:
                work = partial(self.session.step, 0)
            if name == PROBED:
                stack.enter_context(self.session.watched(self.probe))
            elif name == ANOMALY:
                stack.enter_context(warnings.catch_warnings(action="ignore"))  # "anomaly detection has been enabled"
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            elif name == HOOKS:
                stack.enter_context(debug_underflow_overflow(self.session.model))
            elif name == DISPATCH:
                stack.enter_context(FiniteEveryOp())
            start = time.process_time()
            work()
            return time.process_time() - start

    def run(self, repeats: int) -> None:
        """Warm up each contender, then measure."""
        for name in self.names:
            self.take(name)
        for repeat in range(repeats):
            shift = repeat % len(self.names)
            for name in self.names[shift:] + self.names[:shift]:
                self.times[name].append(self.take(name))
        if self.probe.sightings.sinks:
            raise RuntimeError(f"the measured run is not healthy: {self.probe.sightings.sinks}")

    def ratios(self, name: str, other: str) -> list[float]:
        """Ratios within each repeat, sorted."""
        return sorted(a / b for a, b in zip(self.times[name], self.times[other], strict=True))


def parts(session: Session) -> dict[str, tuple[float, int]]:
    """Return (CPU seconds, checks) of the probe's reductions in one step, by what they look at."""
    spent: dict[str, tuple[float, int]] = {}

    class TimedProbe(NonFiniteProbe):
        def _check(self, kind: str, name: str, tensor: torch.Tensor) -> None:
            start = time.process_time()
            super()._check(kind, name, tensor)
            seconds, checks = spent.get(kind, (0.0, 0))
            spent[kind] = seconds + time.process_time() - start, checks + 1

    with session.watched(TimedProbe()):
        spent.clear()  # attaching looks at the state once
        session.step(0)
    return spent


def measure(precision: str, repeats: int, *, peers: bool = False, show_parts: bool = False, **size: int) -> Contest:
    """Measure and print one precision's table."""
    with autocast_policy("cuda"):
        session = Session(make_run(precision=precision, **size), device=torch.device("cpu"))
        if not session.has_step(0):
            raise RuntimeError("the benchmark has no batch")
        contest = Contest(session, peers=peers)
        contest.run(repeats)
        count = sum(parameter.numel() for parameter in session.model.parameters())
        print(f"\n{precision}, {count / 1e6:.0f} M parameters, {torch.get_num_threads()} threads, median of {repeats}")
        for name, taken in contest.times.items():
            print(f"  {name:34}{statistics.median(taken) * 1e3:8.0f} ms CPU")
        for name, other in ((BARE, LOOP), (PROBED, LOOP), (PROBED, BARE), *((peer, LOOP) for peer in PEERS if peers)):
            found = contest.ratios(name, other)
            spread = f"(from {found[0]:.3f} to {found[-1]:.3f})"
            print(f"  {name} takes {statistics.median(found):.3f} x the {other} {spread}")
        met = statistics.median(contest.ratios(PROBED, BARE)) <= TARGET
        print(f"  target: {PROBED} at most {TARGET} x {BARE}: {'met' if met else 'MISSED'}")
        if show_parts:
            for kind, (seconds, checks) in sorted(parts(session).items(), key=lambda item: -item[1][0]):
                print(f"    {kind:16}{seconds * 1e3:8.1f} ms CPU in {checks:5} checks")
        session.close()
    return contest


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16", "fp16"), help="default: fp32")
    parser.add_argument("--peers", action="store_true", help="also time what users reach for instead")
    parser.add_argument("--parts", action="store_true", help="also show where the probe's time goes")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for precision in options.precision or ("fp32",):
        measure(precision, options.repeats, peers=options.peers, show_parts=options.parts)


if __name__ == "__main__":
    main()
