"""An LSTM over characters: two layers, Adam, clipping."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.gpt import next_character
from benchmarks.training.material import characters, text_batches


class CharacterLSTM(nn.Module):
    """An embedding, torch's LSTM, and a linear head."""

    def __init__(self, vocabulary: int, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Indices (batch, context) to logits (batch, context, vocabulary)."""
        hidden, _ = self.lstm(self.tokens(tokens))
        return self.head(hidden)


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    _, vocabulary = characters()
    model = CharacterLSTM(vocabulary)
    return TrainingRun(
        model=model,
        batches=text_batches(seed, steps, size=16, context=32),
        loss=next_character,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        precision=precision,
        scaler=scaler or {},
        max_grad_norm=1.0,
    )
