"""A Wasserstein GAN with gradient penalty on handwritten digits, in mixed precision as torch's AMP examples write it.

Five steps of the critic to one of the generator, Adam with betas (0, 0.9), one scaler for both. The penalty's own
backward is scaled as well, or its gradients underflow; `torch.autograd.grad` does not unscale, so the step does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.material import Batch, digit_batches

NOISE = 32
CRITIC_STEPS = 5
PENALTY = 10.0


class Gan(nn.Module):
    """The generator, noise (batch, NOISE) to images (batch, 1, 8, 8), and the critic, images to (batch, 1)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 2 * width * 4),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 4, 1),
        )


def step(*, model: nn.Module, batch: Batch, optimizer: Any, scaler: Any, autocast: Any, step: int) -> Tensor:
    """A step of the critic, every fifth time one of the generator as well; returns the critic's loss."""
    real, _ = batch
    optimizer["critic"].zero_grad(set_to_none=True)
    noise = torch.randn(len(real), NOISE, device=real.device)
    with autocast(), torch.no_grad():
        fake = model.generator(noise).float()
    with autocast():
        distance = model.critic(fake).mean() - model.critic(real).mean()
    loss = distance + PENALTY * _penalty(model.critic, real, fake, scaler, autocast)
    scaler.scale(loss).backward()
    scaler.step(optimizer["critic"])
    if step % CRITIC_STEPS == CRITIC_STEPS - 1:
        optimizer["generator"].zero_grad(set_to_none=True)
        noise = torch.randn(len(real), NOISE, device=real.device)
        with autocast():
            fooled = -model.critic(model.generator(noise)).mean()
        scaler.scale(fooled).backward()
        scaler.step(optimizer["generator"])
    scaler.update()
    return loss.detach()


def _penalty(critic: nn.Module, real: Tensor, fake: Tensor, scaler: Any, autocast: Any) -> Tensor:
    """The mean squared distance from 1 of the norm of the critic's gradient, between real and generated images."""
    share = torch.rand(len(real), 1, 1, 1, device=real.device)
    between = (share * real + (1 - share) * fake).requires_grad_()
    with autocast():
        scores = critic(between).sum()
    (scaled,) = torch.autograd.grad(scaler.scale(scores), between, create_graph=True)
    gradient = scaled * (1.0 / scaler.get_scale())
    with autocast():
        return (gradient.flatten(1).norm(dim=1) - 1.0).square().mean()


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    model = Gan()
    return TrainingRun(
        model=model,
        batches=digit_batches(seed, steps, size=32),
        step=step,
        optimizer={
            "critic": torch.optim.Adam(model.critic.parameters(), lr=2e-4, betas=(0.0, 0.9)),
            "generator": torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.0, 0.9)),
        },
        precision=precision,
        scaler=scaler or {},
    )
