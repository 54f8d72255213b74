"""What watching costs: a training step with the non-finite probe against the same step without it.

Run: python benchmarks/overhead.py [--repeats 7] [--precision fp32] [--peers] [--parts] [--width 512]

The model is a 12-block transformer language model, d = 512, AdamW; with --width 64 its tensors are so small that what a
check costs besides reading is seen. Three contenders take the same step on the same
model and batch: a hand-written loop, the replay engine's bare step, and the engine's step with `NonFiniteProbe`
attached; and, with --peers, the hand-written loop under each tool of `peers/watching.py` that is installed (`make
peers` makes an environment with all of them). Each repeat times all of them one after the other, in turning order, so
that a busy neighbour slows all of them; what is printed are medians, and ratios are medians of the ratios within a
repeat. Times are CPU seconds of the process, with one thread: threads that wait for each other while a neighbour holds
a core burn CPU seconds too.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
import warnings
from contextlib import ExitStack, chdir, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ampdoctor import TrainingRun  # the repository is on the path only now
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.replay.session import Session
from benchmarks.peers.watching import FLOOR, WATCHERS, Watched, without_backward_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOP, BARE, PROBED = "hand-written loop", "bare step", "probed step"
SEES = {PROBED: "f+b+w, optimizer"}
TARGET = 1.03
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
        out: torch.Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


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
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


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


def clock(device: torch.device) -> float:
    """Return CPU seconds of the process; on a GPU the time, once it has done all that it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def hand_written(session: Session, watched: Watched | None = None) -> float:
    """Take the step as a user's own loop takes it, and read the loss once."""
    watched = watched or Watched(session.model, session.optimizers["optimizer"])
    watched.optimizer.zero_grad(set_to_none=True)
    with session.precision.context(session.device.type)():
        loss = language_model_loss(watched.model, session.batches_of(0)[0])
    session.scaler.scale(loss).backward()
    if watched.after is not None:
        watched.after(loss)
    session.scaler.step(watched.optimizer)
    session.scaler.update()
    return loss.item()


class Contest:
    """Times the contenders on one session.

    Attributes:
        watchers: The peers that take part, by name.
        absent: Why the others do not, by name.
        times: Seconds of each contender's steps, by `clock`.
    """

    def __init__(self, session: Session, *, peers: bool) -> None:
        self.session = session
        self.probe = NonFiniteProbe()
        entered = {watcher.title: watcher for watcher in WATCHERS if peers}
        missing = {title: watcher.missing() for title, watcher in entered.items()}
        self.absent = {title: reason for title, reason in missing.items() if reason is not None}
        self.watchers = {title: entered[title] for title in entered if title not in self.absent}
        self.times: dict[str, list[float]] = {name: [] for name in (LOOP, BARE, PROBED, *self.watchers)}

    def take(self, name: str) -> float:
        """Take one step and return its seconds; attaching hooks is once a run, not once a step, and not timed."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # of hooks and modes that are not ours
            stack.enter_context(redirect_stdout(io.StringIO()))
            work: Callable[[], object] = partial(hand_written, self.session)
            if name in {BARE, PROBED}:
                work = partial(self.session.step, 0)
            if name == PROBED:
                stack.enter_context(self.session.watched(self.probe))
            elif name in self.watchers:
                attach = self.watchers[name].attach
                stack.callback(without_backward_hooks, self.session.model)
                watched = stack.enter_context(attach(self.session.model, self.session.optimizers["optimizer"]))
                work = partial(hand_written, self.session, watched)
            start = clock(self.session.device)
            work()
            return clock(self.session.device) - start

    def run(self, repeats: int) -> None:
        """Warm up each contender, then measure; a peer that fails is left out, with its reason."""
        for name in list(self.times):
            try:
                self.take(name)
            except Exception as error:
                if name not in self.watchers:
                    raise
                self.absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                del self.times[name]
        names = list(self.times)
        for repeat in range(repeats):
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                self.times[name].append(self.take(name))
        if self.probe.report.affected:
            raise RuntimeError(f"the measured run is not healthy: {self.probe.report.affected}")

    def ratios(self, name: str, other: str) -> list[float]:
        """Ratios within each repeat, sorted."""
        return sorted(a / b for a, b in zip(self.times[name], self.times[other], strict=True))

    def both_ways(self) -> list[str]:
        """Peers that see forward and backward; what only says that something is wrong somewhere is none."""
        return [name for name, watcher in self.watchers.items() if watcher.sees == "f+b" and name in self.times]


def parts(session: Session) -> dict[str, tuple[float, int]]:
    """Return (CPU seconds, checks) of the probe's reductions in one step, by what they look at."""
    spent: dict[str, tuple[float, int]] = {}

    def note(kind: str, start: float, checks: int) -> None:
        seconds, before = spent.get(kind, (0.0, 0))
        spent[kind] = seconds + time.process_time() - start, before + checks

    class TimedProbe(NonFiniteProbe):
        def _check(self, kind: str, name: str, tensor: torch.Tensor) -> None:
            start = time.process_time()
            super()._check(kind, name, tensor)
            note(kind, start, 1)

        def finish(self, step: int, loss: Any) -> None:
            start = time.process_time()
            super().finish(step, loss)
            note("state", start, 1)  # and the reading of all results

    with session.watched(TimedProbe()):
        spent.clear()  # attaching looks at the state once
        session.step(0)
    return spent


def measure(precision: str, repeats: int, *, peers: bool = False, show_parts: bool = False, **size: int) -> Contest:
    """Measure and print one precision's table."""
    with autocast_policy("cuda"), TemporaryDirectory() as folder, chdir(folder):  # some peers write where they stand
        session = Session(make_run(precision=precision, **size), device=torch.device("cpu"))
        if not session.has_step(0):
            raise RuntimeError("the benchmark has no batch")
        contest = Contest(session, peers=peers)
        contest.run(repeats)
        count = sum(parameter.numel() for parameter in session.model.parameters())
        print(
            f"\n{precision}, {count / 1e6:.0f} M parameters, {torch.get_num_threads()} threads, median of {repeats}\n"
        )
        print(*table(contest), sep="\n")
        for line in targets(contest):
            print(line)
        if show_parts:
            for kind, (seconds, checks) in sorted(parts(session).items(), key=lambda item: -item[1][0]):
                print(f"    {kind:16}{seconds * 1e3:8.1f} ms CPU in {checks:5} checks")
        session.close()
    return contest


def table(contest: Contest) -> Iterator[str]:
    """Yield the lines of the table, as Markdown: who costs least first, and who did not take part last."""
    yield "| contender | sees | ms CPU | against | ratio | lowest to highest |"
    yield "| --- | --- | --: | --- | --: | --: |"
    pairs = [(BARE, LOOP), (PROBED, BARE), (PROBED, LOOP)]
    pairs += [(name, LOOP) for name in contest.times if name in contest.watchers]
    for name, other in sorted(pairs, key=lambda pair: statistics.median(contest.ratios(*pair))):
        found = contest.ratios(name, other)
        sees = contest.watchers[name].sees if name in contest.watchers else SEES.get(name, "")
        milliseconds = statistics.median(contest.times[name]) * 1e3
        yield (
            f"| {name} | {sees} | {milliseconds:.0f} | {other} | {statistics.median(found):.2f} "
            f"| {found[0]:.2f} to {found[-1]:.2f} |"
        )
    for name, reason in contest.absent.items():
        yield f"| {name} | | | | | not run: {reason} |"


def targets(contest: Contest) -> Iterator[str]:
    """Say which target is met."""
    probed = statistics.median(contest.ratios(PROBED, BARE))
    yield f"\ntarget: {PROBED} at most {TARGET:.2f} x {BARE}: {'met' if probed <= TARGET else 'MISSED'} ({probed:.3f})"
    rivals = [name for name in contest.both_ways() if name != FLOOR]
    if rivals:
        probed = statistics.median(contest.ratios(PROBED, LOOP))
        best = min(rivals, key=lambda name: statistics.median(contest.ratios(name, LOOP)))
        least = statistics.median(contest.ratios(best, LOOP))
        met = "met" if probed < least else "MISSED"
        yield f"target: below every peer that sees both ways: {met} ({probed:.3f}; {best} takes {least:.3f})"


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16", "fp16"), help="default: fp32")
    parser.add_argument("--peers", action="store_true", help="also time who watches a step instead (see peers/)")
    parser.add_argument("--parts", action="store_true", help="also show where the probe's time goes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for precision in options.precision or ("fp32",):
        measure(precision, options.repeats, peers=options.peers, show_parts=options.parts, width=options.width)


if __name__ == "__main__":
    main()
