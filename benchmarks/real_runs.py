"""Trainings of the sizes that people have, with random weights: the runs of `real_sizes.py`.

    ampdoctor bisect-nan benchmarks/real_runs.py:make_run --arg model='"gpt2"' --arg steps=4

Each is the architecture's own class in transformers with its published sizes, AdamW, and a batch of the size that its
fine-tuning guides take on a small GPU. `bad` is a step whose loss is taken from logits that fp16 does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from ampdoctor import TrainingRun

Batch = dict[str, Any]
BOOST = 2.0**20
"""Beyond fp16's range for any logit that is not tiny, and harmless in fp32 and bf16."""


class Kind(NamedTuple):
    """One architecture.

    Attributes:
        build: Makes the model, with random weights.
        batch: Makes a batch of its inputs and labels.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def _tokens(rows: int, length: int, vocabulary: int) -> Batch:
    ids = torch.randint(vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids}


def _images(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 224, 224), "labels": torch.randint(1000, (rows,))}


def _speech() -> Batch:
    return {"input_values": torch.randn(2, 16_000), "labels": torch.randint(12, (2,))}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=50_304,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def _gpt2(layers: int = 12, length: int = 128) -> Kind:
    config = transformers.GPT2Config(n_layer=layers)
    return Kind(lambda: transformers.GPT2LMHeadModel(config), lambda: _tokens(2, length, 50_257))


KINDS: dict[str, Kind] = {
    "gpt2": _gpt2(),
    "gpt2, 3 layers": _gpt2(3),
    "gpt2, 6 layers": _gpt2(6),
    "gpt2, 3 layers, 256 tokens": _gpt2(3, 256),
    "gpt2, 3 layers, 512 tokens": _gpt2(3, 512),
    "t5-base": Kind(_t5, lambda: _tokens(2, 128, 32_128)),
    "vit-b16": Kind(
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)), lambda: _images(4)
    ),
    "resnet50": Kind(
        lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)),
        lambda: _images(4),
    ),
    "hubert-base": Kind(
        lambda: transformers.HubertForSequenceClassification(
            transformers.HubertConfig(num_labels=12, apply_spec_augment=False)
        ),
        _speech,
    ),
    "llama-160m": Kind(_llama, lambda: _tokens(2, 128, 50_304)),
}


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    boost = batch["boost"]
    logits = model(**{key: value for key, value in batch.items() if key != "boost"}).logits
    labels = batch["labels"]
    if boost != 1.0:
        logits = logits * boost
    if labels.dim() == 2:
        logits = logits[:, :-1].flatten(0, 1) if logits.shape[1] == labels.shape[1] else logits.flatten(0, 1)
        labels = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels)


def batches(kind: Kind, steps: int, bad: int | None) -> Iterator[Batch]:
    """The batches of a run, the same at every call."""
    torch.manual_seed(1)
    for step in range(steps):
        yield {**kind.batch(), "boost": BOOST if step == bad else 1.0}


def make_run(*, model: str = "gpt2", steps: int = 4, bad: int | None = None, precision: str = "fp16") -> TrainingRun:
    """The run of one architecture.

    Args:
        model: One of `KINDS`.
        steps: How many batches there are.
        bad: The step that overflows in fp16; None for a healthy run.
        precision: As in `TrainingRun`.
    """
    torch.manual_seed(0)
    kind = KINDS[model]
    module = kind.build().train()
    return TrainingRun(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4),
        loss=_loss,
        batches=list(batches(kind, steps, bad)),
        precision=precision,
    )
