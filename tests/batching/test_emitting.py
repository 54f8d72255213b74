"""What is printed is loaded by the library that it is for; without a library its test is skipped."""

from __future__ import annotations

import importlib
import json
import subprocess
import tomllib
from dataclasses import replace

import pytest
import torch

from ampdoctor.batching.config_files import STRATEGIES, read_settings
from ampdoctor.batching.emitting import emit_plan
from ampdoctor.batching.plans import BatchPlan, Cluster
from tests.scaling.simulated import library

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
ALONE = BatchPlan(micro_batch=8, accumulation=2, data_parallel=1)
HERE = Cluster(devices=1)
PLAN = BatchPlan(micro_batch=8, accumulation=2, data_parallel=128)
THERE = Cluster(devices=128)
SAMPLES = torch.utils.data.TensorDataset(torch.zeros(16, 1))


def run(emitted):
    space = {"dataset": SAMPLES}
    exec(compile(emitted.text, "emitted", "exec"), space)
    return space


def words_of(emitted, array):
    """The words that a program gets after bash has read the array."""
    command = f"set -eu\n{emitted.text}printf '%s\\n' \"${{{array}[@]}}\""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()


def refuses_another_cluster(framework):
    """A line of the fragment stops where the ranks are not those of the plan."""
    with pytest.raises(AssertionError):
        run(emit_plan(replace(ALONE, data_parallel=2), Cluster(devices=2), framework))


def test_transformers():
    library("transformers")
    library("accelerate")
    args = run(emit_plan(ALONE, HERE, "transformers"))["args"]
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 2)
    refuses_another_cluster("transformers")
    said = read_settings(args.to_json_string(), "training_args.json")
    assert (said.framework, said.micro_batch, said.accumulation) == ("transformers", 8, 2)


def test_trainer_arguments_whose_batch_is_that_of_all_ranks():
    library("accelerate")
    made = library("transformers").TrainingArguments(
        per_device_train_batch_size=8, gradient_accumulation_steps=2, accelerator_config={"split_batches": True}
    )
    said = read_settings(made.to_json_string(), "training_args.json")
    assert (said.global_batch, said.micro_batch, said.accumulation) == (16, None, 2)


def test_strategies_are_those_of_accelerate():
    constants = library("accelerate.utils.constants")
    assert list(STRATEGIES) == constants.FSDP_SHARDING_STRATEGY


def test_accelerate():
    module = library("accelerate")
    try:
        space = run(emit_plan(ALONE, HERE, "accelerate"))
        assert space["accelerator"].gradient_accumulation_steps == 2
        assert [len(batch[0]) for batch in space["loader"]] == [8, 8]
        refuses_another_cluster("accelerate")
    finally:
        module.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_an_accelerate_configuration_that_accelerate_has_written(tmp_path):
    library("accelerate")
    config = importlib.import_module("accelerate.commands.config.config_args").ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="DEEPSPEED",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=64,
        deepspeed_config={"gradient_accumulation_steps": 4, "zero_stage": 3},
    )
    file = tmp_path / "default_config.yaml"
    config.to_yaml_file(str(file))
    said = read_settings(file.read_text(), str(file))
    assert (said.devices, said.accumulation, said.shard_stage, said.precision) == (64, 4, 3, "bf16")


def test_lightning():
    library("lightning")
    trainer = run(emit_plan(ALONE, HERE, "lightning"))["trainer"]
    assert (trainer.accumulate_grad_batches, trainer.world_size) == (2, 1)
    with pytest.raises(AssertionError):
        run(emit_plan(replace(ALONE, data_parallel=2), HERE, "lightning"))


def deepspeed_config(sizes, ranks, monkeypatch):
    config = library("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_world_size", lambda *_: ranks)
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    return config.DeepSpeedConfig(sizes)


def test_deepspeed(monkeypatch):
    sizes = json.loads(emit_plan(PLAN, THERE, "deepspeed").text)
    loaded = deepspeed_config(sizes, 128, monkeypatch)
    assert (loaded.train_batch_size, loaded.train_micro_batch_size_per_gpu, loaded.gradient_accumulation_steps) == (
        2048,
        8,
        2,
    )
    with pytest.raises(AssertionError, match="Check batch related parameters"):
        deepspeed_config(sizes, 64, monkeypatch)


def megatron_batches(flags, ranks):
    calculator = library("megatron.core.num_microbatches_calculator")
    given = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
    return calculator.ConstantNumMicroBatchesCalculator(
        given["--global-batch-size"], given["--micro-batch-size"], ranks, False, rank=1
    )


def test_megatron():
    cluster = Cluster(devices=1024, tensor=4, pipeline=2)
    emitted = emit_plan(PLAN, cluster, "megatron")
    flags = words_of(emitted, "BATCH_ARGS")
    said = read_settings(emitted.text, "args.sh")
    assert (said.global_batch, said.micro_batch, said.tensor, said.pipeline, said.context) == (2048, 8, 4, 2, 1)
    assert megatron_batches(flags, 128).get() == 2
    with pytest.raises(AssertionError, match="is not divisible by"):
        megatron_batches(flags, 100)


def test_torchtitan():
    table = tomllib.loads(emit_plan(PLAN, Cluster(devices=512, tensor=4), "torchtitan").text)
    assert table["training"] == {"local_batch_size": 8, "global_batch_size": 2048}
    assert table["parallelism"]["tensor_parallel_degree"] == 4
