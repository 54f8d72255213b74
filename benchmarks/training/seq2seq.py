"""A transformer that spells words backwards, trained as fairseq trains.

The loss is summed over the tokens and scaled; gradients are divided by the number of tokens after they are unscaled, so
that batches of different lengths (and several GPUs) weigh each token alike. The scaled loss is then as large as the
batch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.material import Batch, Batches, drawn, warm_up_then_cosine, words

PAD, BEGIN, END = 0, 1, 2
LONGEST = 12


class Seq2Seq(nn.Module):
    """torch's own encoder and decoder over letters."""

    def __init__(self, width: int = 48, layers: int = 2, vocabulary: int = 29) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.positions = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        shape = {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0}
        encoder = nn.TransformerEncoderLayer(**shape, batch_first=True, norm_first=True)
        decoder = nn.TransformerDecoderLayer(**shape, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Indices (batch, source length) and (batch, target length) to logits (batch, target length, vocabulary)."""
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        memory = self.encoder(self._embedded(source), src_key_padding_mask=source == PAD)
        hidden = self.decoder(
            self._embedded(target),
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.head(hidden)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


def word_batches(seed: int, steps: int, size: int) -> Batches:
    """Batches of words, and of the same words backwards between BEGIN and END, padded to the longest of the batch."""

    def spelled(word: str) -> Tensor:
        return torch.tensor([ord(letter) - ord("a") + 3 for letter in word])

    def padded(rows: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    def batches() -> Iterator[Batch]:
        for chosen in drawn(seed, steps, size, len(words())):
            forth = [spelled(words()[index]) for index in chosen]
            back = [torch.cat([torch.tensor([BEGIN]), word.flip(0), torch.tensor([END])]) for word in forth]
            yield padded(forth), padded(back)

    return batches


def step(model: nn.Module, batch: Batch, optimizer: Any, scaler: Any, autocast: Any) -> Tensor:
    """One step of fairseq's: the sum over tokens is scaled, and what is unscaled is divided by their number."""
    source, target = batch
    optimizer.zero_grad(set_to_none=True)
    with autocast():
        logits = model(source, target[:, :-1])
        expected = target[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=PAD, reduction="sum")
    tokens = int((expected != PAD).sum())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach() / tokens


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    model = Seq2Seq()
    return TrainingRun(
        model=model,
        batches=word_batches(seed, steps, size=32),
        step=step,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98)),
        scheduler=warm_up_then_cosine(steps),
        precision=precision,
        scaler=scaler or {},
    )
