"""A training of several processes, started by torchrun: KIND says how it is made, and where one rank goes bad.

Its weights, and the number of collectives that its process group has run, go to `OUT/RANK.pt`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kind, out = sys.argv[1].split("+"), Path(sys.argv[2])
bad = next((int(one[3:]) for one in kind if one.startswith("bad")), None)
STEPS = 16 if bad is None else bad + 4


class Gated(nn.Module):
    """Takes another branch at each second step."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return self.branches[self.calls % 2](x)


def made():
    torch.manual_seed(0)
    middle = Gated() if "gated" in kind else nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), middle, nn.Dropout(0.1), nn.Linear(16, 4))
    if "fsdp2" in kind:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[4]):
            fully_shard(layer)
        return fully_shard(model)
    if "fsdp1" in kind:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if "tp" in kind:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "hooked" in kind:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size())))
        return model
    ddp = DistributedDataParallel(model, find_unused_parameters="gated" in kind)
    if "powersgd" in kind:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        ddp.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3),
            powerSGD_hook.powerSGD_hook,
        )
    return torch.compile(ddp, backend="aot_eager") if "compiled" in kind else ddp


attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if "raises" in kind:  # in the launcher's store the next attempt would meet the addresses of this one
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=f"file://{out.resolve()}/store{attempt}", **place)
else:
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = made()
critic = DistributedDataParallel(nn.Linear(4, 1)) if "gan" in kind else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
second = torch.optim.SGD(critic.parameters(), lr=1e-2) if critic is not None else None
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in kind)
batches = torch.Generator().manual_seed(100 + (0 if "tp" in kind else rank))


def loss_of(x, y):
    output = model(x)
    if "reduced" in kind:  # a collective on what the model returned, which autograd goes through
        output = output + 0 * dist.nn.functional.all_reduce(output.mean())
    loss = nn.functional.mse_loss(output, y)
    return loss + critic(output).mean() if critic is not None else loss


for step in range(STEPS):
    optimizer.zero_grad()
    micro = 2 if "nosync" in kind else 1
    for part in range(micro):
        x, y = torch.randn(16, 8, generator=batches), torch.randn(16, 4, generator=batches)
        if step == bad and rank == world - 1 and "edit" not in kind:
            x[3, 2] = float("nan")
        if part + 1 < micro:
            with model.no_sync():
                scaler.scale(loss_of(x, y)).backward()
        else:
            scaler.scale(loss_of(x, y)).backward()
    if second is not None:
        second.zero_grad()
        critic(model(x).detach()).square().mean().backward()
        second.step()
    if step == bad and rank == world - 1 and "edit" in kind:
        held = next(model.parameters()).grad
        (held.to_local() if hasattr(held, "to_local") else held)[0, 0] = float("inf")  # of a DTensor's, no collective
    if "raises" in kind and step == bad and rank == world - 1 and attempt == "0":
        raise RuntimeError("no more of this")
    scaler.step(optimizer)
    scaler.update()
    sys.stdout.write(f"rank {rank}, step {step}\n")  # at once: two processes write to one terminal
local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
count = dist.group.WORLD._get_sequence_number_for_group()
torch.save({"weights": [p.detach().clone() for p in local], "collectives": count}, out / f"{rank}.pt")
dist.destroy_process_group()
