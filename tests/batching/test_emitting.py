"""What is printed is loaded by the library that it is for; without a library its test is skipped."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import torch

from ampdoctor.batching.config_fields import STRATEGIES
from ampdoctor.batching.config_files import read_settings
from ampdoctor.batching.effects import left_as_it_is
from ampdoctor.batching.emitting import emit_plan
from ampdoctor.batching.plans import BatchPlan, BatchSettings, Cluster
from ampdoctor.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
ALONE = BatchPlan(micro_batch=8, accumulation=2, data_parallel=1)
HERE = Cluster(devices=1, per_node=1)
PLAN = BatchPlan(micro_batch=8, accumulation=2, data_parallel=128)
THERE = Cluster(devices=128, per_node=8)
SAMPLES = torch.utils.data.TensorDataset(torch.zeros(16, 1))


def library(name):
    """The module, or a skip; libraries warn while they are imported, before a mark can hold."""
    return pytest.importorskip(name, exc_type=ImportError)


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
    two = BatchPlan(micro_batch=4, accumulation=2, data_parallel=2)
    assert [(left.outcome, left.global_batch) for left in left_as_it_is(two, 4, said)] == [("kept", 16)]
    (left,) = left_as_it_is(two, 3, said)
    assert (left.outcome, left.framework) == ("refused", "transformers")


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


SIZES = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8, 12, 24, 48, 64])
@pytest.mark.parametrize(
    "keys", [[0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1]], ids=lambda keys: "".join(map(str, keys))
)
def test_deepspeed_left_as_it_is(ranks, keys, monkeypatch):
    """What is said of each pair of sizes is what DeepSpeed makes of them."""
    sizes = {key: value for index, (key, value) in enumerate(SIZES.items()) if index in keys}
    said = read_settings(json.dumps(sizes), "ds.json")
    before = BatchPlan(micro_batch=4, accumulation=3, data_parallel=4)
    if keys == [0]:
        before = BatchPlan(micro_batch=12, accumulation=1, data_parallel=4)
    if keys == [1]:
        before = BatchPlan(micro_batch=4, accumulation=1, data_parallel=4)
    (left,) = left_as_it_is(before, ranks, said)
    try:
        loaded = deepspeed_config(sizes, ranks, monkeypatch)
    except AssertionError:
        assert (left.outcome, left.global_batch) == ("refused", None)
    else:
        assert left.global_batch == loaded.train_batch_size
        assert left.outcome == ("kept" if loaded.train_batch_size == before.global_batch else "silent")


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, ("silent", 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, ("silent", 64)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 32, ("kept", 128)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 16, ("silent", 64)),
        (SIZES | {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, ("refused", None)),
        ({"train_batch_size": 96, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, 8, None),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 8, ("silent", 64)),
    ],
)
def test_what_stays_is_the_files_own_batch(sizes, ranks, expected):
    """The command line asks for 128 = 4 x 2 x 16: nobody has written that into the file."""
    asked = BatchPlan(micro_batch=4, accumulation=2, data_parallel=16)
    (left,) = left_as_it_is(asked, ranks, read_settings(json.dumps(sizes), "ds.json"))
    assert (left.outcome, left.global_batch) == (expected or ("refused", None))


def test_what_stays_of_megatron_is_the_files_own_batch():
    said = read_settings("--micro-batch-size 2 --global-batch-size 64", "run.sh")
    (left,) = left_as_it_is(BatchPlan(micro_batch=4, accumulation=2, data_parallel=16), 8, said)
    assert (left.outcome, left.global_batch, left.said) == ("silent", 64, "the accumulation is derived, 2 -> 4")


def megatron_batches(flags, ranks, *, rounds_down=False):
    calculator = library("megatron.core.num_microbatches_calculator")
    given = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
    return calculator.ConstantNumMicroBatchesCalculator(
        given["--global-batch-size"], given["--micro-batch-size"], ranks, rounds_down, rank=1
    )


def test_megatron():
    cluster = Cluster(devices=1024, tensor=4, pipeline=2, per_node=8)
    emitted = emit_plan(PLAN, cluster, "megatron")
    flags = words_of(emitted, "BATCH_ARGS")
    said = read_settings(emitted.text, "args.sh")
    assert (said.global_batch, said.micro_batch, said.tensor, said.pipeline, said.context) == (2048, 8, 4, 2, 1)
    assert megatron_batches(flags, 128).get() == 2
    with pytest.raises(AssertionError, match="is not divisible by"):
        megatron_batches(flags, 100)


@pytest.mark.parametrize("rounds_down", [True, False])
@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 6, 7, 8, 16])
def test_megatron_left_as_it_is(ranks, rounds_down):
    before = BatchPlan(micro_batch=2, accumulation=6, data_parallel=4)
    said = BatchSettings(framework="megatron", global_batch=48, micro_batch=2, rounds_down=rounds_down)
    (left,) = left_as_it_is(before, ranks, said)
    flags = ["--global-batch-size", "48", "--micro-batch-size", "2"]
    try:
        made = megatron_batches(flags, ranks, rounds_down=rounds_down)
    except AssertionError:
        assert left.outcome == "refused"
    else:
        assert left.global_batch == made.get_current_running_global_batch_size()
        assert left.outcome == ("kept" if left.global_batch == 48 else "silent")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_accelerate_shares_a_batch_or_refuses(ranks):
    shard = library("accelerate.data_loader").BatchSamplerShard
    before = BatchPlan(micro_batch=2, accumulation=1, data_parallel=4)
    said = BatchSettings(framework="accelerate", accumulation=1, fixed_total=True)
    (left,) = left_as_it_is(before, ranks, said)
    sampler = torch.utils.data.BatchSampler(range(64), batch_size=8, drop_last=False)
    try:
        cut = [len(next(iter(shard(sampler, ranks, rank, split_batches=True)))) for rank in range(ranks)]
    except ValueError:
        assert left.outcome == "refused"
    else:
        assert (left.outcome, sum(cut)) == ("kept", left.global_batch)


def test_torchtitan(monkeypatch):
    text = emit_plan(PLAN, Cluster(devices=512, tensor=4), "torchtitan").text
    said = read_settings(text, "llama.toml")
    assert (said.global_batch, said.micro_batch, said.tensor) == (2048, 8, 4)
    try:
        file = distribution("torchtitan").locate_file("torchtitan/config/job_config.py")
    except PackageNotFoundError:
        pytest.skip("torchtitan is not installed")
    for name in ("torchtitan", "torchtitan.tools", "torchtitan.tools.logging"):  # the package itself needs triton
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchtitan.tools.logging"].logger = None
    spec = spec_from_file_location("job_config", file)
    config = module_from_spec(spec)
    spec.loader.exec_module(config)
    table = tomllib.loads(text)
    training = config.Training(**table["training"])
    assert (training.local_batch_size, training.global_batch_size) == (8, 2048)
    assert config.Parallelism(**table["parallelism"]).tensor_parallel_degree == 4


def test_torchrun():
    words = words_of(emit_plan(PLAN, THERE, "torchrun"), "TORCHRUN_ARGS")
    parsed = importlib.import_module("torch.distributed.run").parse_args([*words, "train.py"])
    assert (parsed.nnodes, parsed.nproc_per_node) == ("16", "8")
    with pytest.raises(UsageError, match="say both"):
        emit_plan(PLAN, Cluster(devices=128), "torchrun")
