"""Models of libraries come back from their configuration; what a library puts around a forward comes back as well."""

from __future__ import annotations

import json

import pytest
import torch

from ampdoctor.replay.bundles.write import write_bundle
from tests.replay.bundles.steps import gradients, load_bundle, replayed, same

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def gpt2():
    """Returns a small GPT-2 with dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def round_trip(loop, folder, model, train, optimizer):
    program = loop.record(train, optimizer, steps=2)
    real = gradients(program.model)
    write_bundle(folder, program)
    run = load_bundle(str(folder))
    _, found = replayed(run)
    same({name: found[name] for name in real}, real)
    return run, json.loads((folder / "manifest.json").read_text())["model"]


def test_a_model_of_transformers_needs_no_code(loop, gpt2, tmp_path):
    optimizer = torch.optim.AdamW(gpt2.parameters())

    def train(_step):
        optimizer.zero_grad()
        ids = torch.randint(0, 50, (2, 8))
        with torch.autocast("cpu", torch.bfloat16):
            gpt2(input_ids=ids, labels=ids).loss.backward()

    run, said = round_trip(loop, tmp_path / "b", gpt2, train, optimizer)
    assert said["kind"] == "transformers"
    assert type(run.model) is type(gpt2)
    assert run.model.lm_head.weight is run.model.transformer.wte.weight


def test_one_lora_comes_back(loop, gpt2, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gpt2, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def train(_step):
        optimizer.zero_grad()
        ids = torch.randint(0, 50, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()

    _, said = round_trip(loop, tmp_path / "b", model, train, optimizer)
    assert said["kind"] == "peft"


def test_what_accelerate_puts_around_a_forward_comes_back(loop, gpt2, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer = accelerator.prepare(gpt2, torch.optim.AdamW(gpt2.parameters()))

    def train(_step):
        optimizer.zero_grad()
        ids = torch.randint(0, 50, (2, 8))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)

    run, _ = round_trip(loop, tmp_path / "b", model, train, optimizer)
    assert (run.precision, run.autocast) == ("bf16", True)
