import torch
from torch import nn

from ampdoctor import TrainingRun


def run(factor, width=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4))
    batches = [(torch.randn(8, width) * (factor if step == 2 else 1), torch.randint(4, (8,))) for step in range(4)]
    return TrainingRun(
        model=model,
        batches=batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]) * 1e-2,
        optimizer=torch.optim.AdamW(model.parameters()),
        precision="fp16",
        scaler={"init_scale": 16.0},
    )


def broken():
    return run(3e5)


def lossy():
    return run(1)
