"""Configurations as their frameworks write them, and what is said of the batch in each."""

from __future__ import annotations

import json
import sys

import pytest

from ampdoctor.batching.reading.opening import read_settings
from ampdoctor.errors import UsageError

GPT = "micro_batch_size: 2\nglobal_batch_size: 128\nmodel_parallel: {tensor_model_parallel_size: 2, bf16: true}\n"
MEGATRON = """#!/bin/bash
# --micro-batch-size 99 is what we had
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size=16   # as large as it gets
)
TRAINING_ARGS="--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --fp16 \\
    --use-distributed-optimizer"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py ${MODEL_PARALLEL_ARGS[@]} $TRAINING_ARGS
"""
TITAN = """
[training]
local_batch_size = 2
global_batch_size = 512
mixed_precision_reduce = "float32"
[parallelism]
tensor_parallel_degree = 4
data_parallel_shard_degree = -1
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
mixed_precision: fp16
num_machines: 2
num_processes: 16
parallelism_config:
  parallelism_config_tp_size: 2
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "train_batch_size": 2048,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
TRAINER = {"per_device_train_batch_size": 4, "bf16": True, "output_dir": "out", "fsdp": ["full_shard", "auto_wrap"]}


def known(settings):
    """What is said, without what is not."""
    fields = {name: getattr(settings, name) for name in settings.__dataclass_fields__ if name != "notes"}
    return {name: value for name, value in fields.items() if value is not None and value is not False}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "pretrain.sh",
            MEGATRON,
            {
                "framework": "megatron",
                "global_batch": 1536,
                "micro_batch": 1,
                "tensor": 8,
                "pipeline": 16,
                "shard_stage": 1,
                "precision": "fp16",
                "reduction": "mean",
                "division": "before",
            },
        ),
        (
            "gpt.yaml",
            GPT,
            {
                "framework": "megatron",
                "global_batch": 128,
                "micro_batch": 2,
                "tensor": 2,
                "precision": "bf16",
                "reduction": "mean",
                "division": "none",
                "shard_stage": 0,
            },
        ),
        (
            "llama.toml",
            TITAN,
            {
                "framework": "torchtitan",
                "global_batch": 512,
                "micro_batch": 2,
                "tensor": 4,
                "shard_stage": 3,
                "precision": "bf16",
                "reduction": "mean",
                "division": "none",
            },
        ),
        (
            "default_config.yaml",
            ACCELERATE,
            {
                "framework": "accelerate",
                "devices": 16,
                "tensor": 2,
                "shard_stage": 2,
                "precision": "fp16",
                "division": "split",
            },
        ),
        (
            "ds.json",
            json.dumps(DEEPSPEED),
            {
                "framework": "deepspeed",
                "global_batch": 2048,
                "micro_batch": 4,
                "shard_stage": 2,
                "precision": "fp16",
                "division": "before",
            },
        ),
        (
            "args.json",
            json.dumps(TRAINER),
            {
                "framework": "transformers",
                "micro_batch": 4,
                "accumulation": 1,
                "shard_stage": 3,
                "precision": "bf16",
                "reduction": "tokens",
                "division": "none",
            },
        ),
        (
            "args.yml",
            "per_device_train_batch_size: 2\ngradient_accumulation_steps: 16\nfp16: true\n",
            {
                "framework": "transformers",
                "micro_batch": 2,
                "accumulation": 16,
                "precision": "fp16",
                "reduction": "tokens",
                "division": "none",
            },
        ),
    ],
)
def test_what_a_configuration_says(name, text, expected):
    found = known(read_settings(text, name))
    assert found == expected


@pytest.mark.parametrize(
    ("changed", "division"),
    [
        ({"zero_optimization": {"stage": 0}}, "after"),
        ({"zero_optimization": {"stage": 0}, "prescale_gradients": True}, "before"),
        ({"zero_optimization": {"stage": 2, "reduce_scatter": False}}, "after"),
        ({"zero_optimization": {"stage": 3, "reduce_scatter": False}}, "before"),
        ({"communication_data_type": "fp32"}, "none"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "none"),
    ],
)
def test_when_deepspeed_divides(changed, division):
    assert read_settings(json.dumps({**DEEPSPEED, **changed}), "ds.json").division == division


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.json", '{"train_batch_size": 2.5}', "train_batch_size is a whole number of at least 1, not 2.5"),
        ("x.json", '{"train_batch_size": 0}', "at least 1, not 0"),
        ("x.json", '{"train_batch_size": true}', "not True"),
        ("x.json", '{"train_batch_size"', "x.json is not JSON"),
        ("x.json", "[1]", "no table of settings"),
        ("x.json", '{"zero_optimization": {"stage": 4}}', "0, 1, 2 or 3, not 4"),
        ("x.json", '{"zero_optimization": 3}', "zero_optimization is a table, not 3"),
        ("x.toml", "[training\n", "is not TOML"),
        ("x.toml", "[training]\nnum_tokens_per_train_step = 4194304\n", "counts tokens"),
        ("x.toml", "[tool]\n", "says nothing of a batch"),
        ("x.yaml", "a: [1", "x.yaml is not YAML"),
        ("x.yaml", "distributed_type: NO\nmixed_precision: int4\n", "mixed_precision is no, fp16, bf16 or fp8"),
        ("x.sh", "echo nothing", "says nothing of a batch: it is none of a DeepSpeed JSON"),
        ("x.sh", "--micro-batch-size $MBS --global-batch-size 8", r"the shell's \$MBS"),
        ("x.sh", "--micro-batch-size 4k", "not '4k'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(name, text, sentence):
    with pytest.raises(UsageError, match=sentence):
        read_settings(text, name)


def test_aliases_that_would_fill_the_memory_are_not_written_out():
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
    text = f"a0: &a0 [x]\n{levels}"
    for key in ("micro_batch_size", "distributed_type: X\nmixed_precision", "train_batch_size", "zero_optimization"):
        with pytest.raises(UsageError, match=r"a list"):
            read_settings(f"{text}{key}: *a39\n", "bomb.yaml")
    with pytest.raises(UsageError, match=r"not 'x{59}$"):
        read_settings(json.dumps({"train_batch_size": "x" * 10**6}), "long.json")


def test_without_pyyaml_a_yaml_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"PyYAML, which reads it, is not installed"):
        read_settings("per_device_train_batch_size: 1", "a.yaml")
