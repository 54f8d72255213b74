"""A small transformer with names as long as real ones have, whose loss is too small for its loss scale."""

import torch
from torch import nn

from ampdoctor import TrainingRun


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.self_attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed_forward_network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.input_norm = nn.LayerNorm(width)
        self.output_norm = nn.LayerNorm(width)

    def forward(self, x):
        normed = self.input_norm(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        return x + self.feed_forward_network(self.output_norm(x)) * 1e-3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.transformer_encoder_layers = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.transformer_encoder_layers:
            x = block(x)
        return self.head(x)


def make_run():
    torch.manual_seed(0)
    model = Model()
    batches = [torch.randint(50, (8, 16)) for _ in range(4)]
    return TrainingRun(
        model=model,
        batches=batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()) * 1e-2,
        optimizer=torch.optim.AdamW(model.parameters()),
        precision="fp16",
        scaler={"init_scale": 16.0},
    )
