"""A training that torchrun starts: `shrinking.py FOLDER JOBS`, where JOBS are JSON objects of `Job`'s fields.

It learns the letters of the project's licence with a small transformer, from the step that its checkpoint holds to
another, and writes what the loss was at each step. In float64 and at its own weights, rank 0 takes the same step's
exact gradient over all samples, and writes how far the one that the optimizer got is from it.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ampdoctor

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()[:3000]
LETTERS = sorted(set(TEXT))
CONTEXT = 15
GLOBAL_BATCH = 16
RATES = {"sgd": 0.2, "adamw": 3e-3}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, or a part of it.

    Attributes:
        name: Of its files.
        precision: "fp32", "bf16" or "fp16".
        optimizer: Of `RATES`.
        most: The largest micro-batch.
        until: The step before which it ends.
        resume: The checkpoint to start from; None for the beginning.
        save_at: The step before which a checkpoint is written.
        exact: Compare with the exact gradient.
        counted: The loss is a sum over the letters that no space precedes, divided by their number in the whole step.
    """

    name: str
    precision: str
    optimizer: str
    most: int
    until: int
    resume: str | None = None
    save_at: int | None = None
    exact: bool = False
    counted: bool = False


class Letters(Dataset):
    """Stretches of the text, each with the letter that follows each of its letters."""

    def __len__(self) -> int:
        return len(TEXT) // CONTEXT - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        part = TEXT[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return torch.tensor([LETTERS.index(letter) for letter in part])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    width = 24
    return nn.Sequential(nn.Embedding(len(LETTERS), width), Block(width), Block(width), nn.Linear(width, len(LETTERS)))


def loss_of(model: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    logits = model(letters[:, :-1])
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), letters[:, 1:].flatten())


def counted(letters: torch.Tensor) -> torch.Tensor:
    return letters[:, :-1] != LETTERS.index(ord(" "))


def sum_of(model: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    labels = letters[:, 1:].masked_fill(~counted(letters), -100)
    return functional.cross_entropy(model(letters[:, :-1]).float().flatten(0, 1), labels.flatten(), reduction="sum")


def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if job.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=RATES["sgd"])
    return torch.optim.AdamW(model.parameters(), lr=RATES["adamw"])


def train(job: Job, folder: Path) -> None:
    batch = ampdoctor.elastic_batch(GLOBAL_BATCH, job.most)
    data, sampler = Letters(), batch.sampler(Letters(), seed=3)
    loader = DataLoader(data, batch_sampler=sampler)
    net = make_model()
    optimizer = make_optimizer(job, net)
    scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "fp16")
    step = 0
    if job.resume is not None:
        saved = torch.load(folder / f"{job.resume}.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if scaler.is_enabled():  # each of fewer ranks has a larger share, and gradients that are smaller by as much
            saved["scaler"]["scale"] *= saved["ranks"] / batch.data_parallel
        scaler.load_state_dict(saved["scaler"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    half = torch.autocast("cpu", HALF[job.precision]) if job.precision in HALF else nullcontext()
    rows = []
    while step < job.until:
        epoch, done = divmod(step, sampler.steps_per_epoch)
        sampler.set_epoch(epoch, start=done)
        count = (lambda letters: counted(letters).sum()) if job.counted else None
        for window in sampler.steps(loader, count=count):
            if step == job.save_at:
                parts = {"model": net, "optimizer": optimizer, "scaler": scaler}
                save(folder / f"{job.name}.pt", parts, step=step, ranks=batch.data_parallel)
            if step == job.until:
                break
            looks = job.exact and dist.get_rank() == 0
            exact = exact_gradient(net, data, sampler, window) if looks else None
            optimizer.zero_grad()
            losses = []
            for micro in window:
                with nullcontext() if micro.last else model.no_sync():
                    with half:
                        loss = (sum_of if job.counted else loss_of)(model, micro.data)
                    scaler.scale(loss * micro.weight).backward()
                losses.append(micro.weight * loss.item())
            scaler.unscale_(optimizer)
            row = {"step": step, "loss": mean_loss(losses), "samples": window.samples}
            if exact is not None:
                row |= apart(net, exact)
            rows.append(row)
            scaler.step(optimizer)
            scaler.update()
            step += 1
    if dist.get_rank() == 0:
        last = {"weights": [p.detach().flatten().tolist() for p in net.parameters()], "scale": scaler.get_scale()}
        text = json.dumps({"rows": rows, "micro_batch": batch.micro_batch, "ranks": batch.data_parallel, **last})
        (folder / f"{job.name}.json").write_text(text)


def save(path, parts, **numbers):
    if dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()} | numbers, path)


def mean_loss(losses: list[float]) -> float:
    """The step's mean loss: every rank's sum, divided by the ranks; sums of so few floats are exact in float64."""
    total = torch.tensor(sum(losses), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def exact_gradient(net, data, sampler, window):
    """The gradient of the mean over the step's samples, in float64, and the norms of what is summed for it."""
    first = window.step * GLOBAL_BATCH
    letters = torch.stack([data[i] for i in sampler._order()[first : first + window.samples]])
    wide = copy.deepcopy(net).double()
    parameters = list(wide.parameters())

    def gradient(part):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(wide, part), parameters)])

    # the four micro-batches of one rank each, whatever cluster this is
    parts = letters.tensor_split(4)
    norms = sum(float(gradient(part).norm()) * len(part) / len(letters) for part in parts)
    return gradient(letters), norms, growth(wide, letters) if window.step % 4 == 0 else 1.0


def growth(wide, letters):
    """The spectral norm of a step's Jacobian I - rate H, by power iteration: how a difference of weights grows."""
    parameters = list(wide.parameters())
    gradients = torch.autograd.grad(loss_of(wide, letters), parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradients])
    vector, size = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1.0
    for _ in range(20):
        vector = vector / vector.norm()
        product = torch.autograd.grad(flat, parameters, vector, retain_graph=True)
        vector = vector - RATES["sgd"] * torch.cat([p.flatten() for p in product])
        size = float(vector.norm())
    return size


def apart(net, exact):
    gradient, norms, grown = exact
    got = torch.cat([p.grad.flatten() for p in net.parameters()]).double()
    return {
        "error": float((got - gradient).norm()),
        "gradient": float(gradient.norm()),
        "summed": norms,
        "growth": grown,
    }


def main(folder: str, jobs: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for job in json.loads(jobs):
        train(Job(**job), Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
