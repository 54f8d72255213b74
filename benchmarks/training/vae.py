"""A variational autoencoder on handwritten digits, with the loss of torch's example: summed over pixels and batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.material import Batch, digit_batches


class Vae(nn.Module):
    """One hidden layer on either side of a Gaussian code."""

    def __init__(self, hidden: int = 256, code: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, hidden)
        self.mean = nn.Linear(hidden, code)
        self.log_variance = nn.Linear(hidden, code)
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images (batch, 1, 8, 8) to (logits of the pixels (batch, 64), mean, log-variance (batch, code))."""
        hidden = F.relu(self.encoder(images.flatten(1)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        deviation = torch.exp(0.5 * log_variance)
        return self.decoder(mean + deviation * torch.randn_like(deviation)), mean, log_variance


def bound(model: nn.Module, batch: Batch) -> Tensor:
    """Reconstruction and divergence from the prior, summed over the batch, in nats."""
    images, _ = batch
    logits, mean, log_variance = model(images)
    reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return reconstruction + divergence


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    model = Vae()
    return TrainingRun(
        model=model,
        batches=digit_batches(seed, steps, size=128),
        loss=bound,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        precision=precision,
        scaler=scaler or {},
    )
