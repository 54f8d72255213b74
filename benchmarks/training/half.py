"""A character transformer with half weights and no autocast: the optimizer keeps fp32 masters, as Apex O2 does."""

from __future__ import annotations

import torch

from ampdoctor import TrainingRun
from benchmarks.training.gpt import GPT, adamw, next_character
from benchmarks.training.material import characters, text_batches, warm_up_then_cosine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    context = 32
    _, vocabulary = characters()
    model = GPT(4, 48, heads=4, context=context, vocabulary=vocabulary).to(DTYPES[precision])
    return TrainingRun(
        model=model,
        batches=text_batches(seed, steps, size=16, context=context),
        loss=next_character,
        optimizer=adamw(model, lr=1e-3),
        scheduler=warm_up_then_cosine(steps),
        precision=precision,
        autocast=False,
        master_weights=precision != "fp32",
        scaler=scaler or {},
        max_grad_norm=1.0,
    )
