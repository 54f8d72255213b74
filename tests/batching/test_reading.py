"""Configurations as their frameworks write them, and what is said of the batch in each."""

from __future__ import annotations

import json
import sys

import pytest

from ampdoctor.batching.config_files import read_settings
from ampdoctor.batching.plans import current_plan
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
ARGS = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 16\nfp16: true\n"
TRAINER = {"per_device_train_batch_size": 4, "bf16": True, "output_dir": "out", "fsdp": ["full_shard", "auto_wrap"]}


FLAGS = "--per_device_train_batch_size 4 --gradient_accumulation_steps=2 --fp16 True"
DASHED = "--per-device-train-batch-size 4 --gradient-accumulation-steps 2 --fp16 --output-dir out"
APART = 'if [[ $1 == "--micro-batch-size" ]]; then shift; fi\n[ -f x ] && run --micro-batch-size 4 --bf16'
MEGATRON_ALL = {"global_batch": 1536, "micro_batch": 1, "tensor": 8, "pipeline": 16, "reduction": "mean"}


@pytest.mark.parametrize(
    ("name", "text", "said", "more"),
    [
        ("pretrain.sh", MEGATRON, ("megatron", 1, "fp16", "before"), MEGATRON_ALL),
        ("gpt.yaml", GPT, ("megatron", 0, "bf16", "none"), {"global_batch": 128, "tensor": 2, "reduction": "mean"}),
        ("a.yaml", ACCELERATE, ("accelerate", 2, "fp16", "split"), {"devices": 16, "tensor": 2, "context": 1}),
        ("ds.json", json.dumps(DEEPSPEED), ("deepspeed", 2, "fp16", "before"), {"global_batch": 2048}),
        ("args.json", json.dumps(TRAINER), ("transformers", 3, "bf16", "none"), {"micro_batch": 4, "accumulation": 1}),
        ("args.yml", ARGS, ("transformers", None, "fp16", "none"), {"accumulation": 16, "reduction": "tokens"}),
        ("run.sh", f"torchrun train.py {FLAGS}", ("transformers", None, "fp16", "none"), {"accumulation": 2}),
        ("run.sh", f"torchrun train.py {DASHED}", ("transformers", None, "fp16", "none"), {"micro_batch": 4}),
        ("run.sh", APART, ("megatron", 0, "bf16", "none"), {"micro_batch": 4}),
    ],
)
def test_what_a_configuration_says(name, text, said, more):
    found = read_settings(text, name)
    assert (found.framework, found.shard_stage, found.precision, found.division) == said
    assert {key: getattr(found, key) for key in more} == more


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
        ("x.json", '{"train_batch_size": true}', "not True"),
        ("x.json", '{"train_batch_size"', "x.json is not JSON"),
        ("x.json", "[1]", "no table of settings"),
        ("x.json", '{"zero_optimization": 3}', "zero_optimization is a table, not 3"),
        ("x.toml", "[training]\nlocal_batch_size = 2\n", "says nothing of a batch"),
        ("x.yaml", "a: [1", "x.yaml is not YAML"),
        ("x.yaml", "distributed_type: NO\nmixed_precision: int4\n", "mixed_precision is no, fp16, bf16 or fp8"),
        ("x.sh", "echo nothing", "says nothing of a batch: it is none of a DeepSpeed JSON"),
        ("x.sh", "--micro-batch-size $MBS --global-batch-size 8", r"the shell's \$MBS"),
        ("x.yaml", "micro_batch_size: 2\ngradient_accumulation_steps: 8\n", "neither Megatron-LM's nor Trainer's"),
        ("x.yaml", "output_dir: out\nbf16: 3\n", "bf16 is true or false, not 3"),
        ("x.yaml", "output_dir: out\nfsdp: half_shard\n", "fsdp is one of FULL_SHARD, .*, not 'half_shard'"),
        ("x.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 6}\n", "HYBRID_SHARD_ZERO2, not 6"),
        ("x.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: true}\n", "0, 1, 2 or 3, not True"),
        ("x.sh", "--micro-batch-size 4 --fp16 --bf16", "x.sh: fp16 and bf16 are both on"),
        ("x.json", '{"train_batch_size": 8, "train_batch_size": 4}', "'train_batch_size' stands twice in one table"),
        ("x.json", '{"train_batch_size": ' + "9" * 6000 + "}", "is not JSON"),
        ("x.json", "[" * 100_000, "is not JSON"),
        ("x.yaml", "base: &base {bf16: true}\n<<: *base\noutput_dir: out\n", "merges keys"),
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


def test_a_default_that_is_taken_is_said():
    said = read_settings("output_dir: out\n", "a.yaml")
    assert said.micro_batch == 8
    assert any("is not given: 8, as" in note for note in said.notes)


SHARED = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "output_dir": "out"}


@pytest.mark.parametrize("more", [{"accelerator_config": {"split_batches": True}}, {"split_batches": True}])
def test_split_batches_makes_the_batch_that_of_all_ranks(more):
    said = read_settings(json.dumps({**SHARED, **more}), "args.json")
    assert (said.global_batch, said.micro_batch, said.accumulation) == (64, None, 2)
    plan, _ = current_plan(said, 16, None)
    assert (plan.micro_batch, plan.accumulation) == (2, 2)
    with pytest.raises(UsageError, match="64 samples over 5 data parallel ranks are no 2 even micro-batches"):
        current_plan(said, 5, None)


def test_without_split_batches_it_is_that_of_a_rank():
    said = read_settings(json.dumps({**SHARED, "accelerator_config": {"split_batches": False}}), "args.json")
    assert (said.global_batch, said.micro_batch) == (None, 32)
    with pytest.raises(UsageError, match="accelerator_config is a table"):
        read_settings(json.dumps({**SHARED, "accelerator_config": "accelerator.json"}), "args.json")


@pytest.mark.parametrize(
    ("fsdp", "stage"),
    [
        ({}, 3),
        ({"fsdp_sharding_strategy": "2"}, 2),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 0),
        ({"fsdp_sharding_strategy": 5}, 2),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 3),
        ({"fsdp_version": 2}, 3),
        ({"fsdp_version": "2", "fsdp_reshard_after_forward": "false"}, 2),
    ],
)
def test_what_fsdp_of_accelerate_cuts(fsdp, stage):
    table = {"distributed_type": "FSDP", "num_processes": 64, "fsdp_config": fsdp}
    said = read_settings(json.dumps(table), "default_config.json")
    assert said.shard_stage == stage
    hybrid = fsdp.get("fsdp_sharding_strategy") in ("HYBRID_SHARD", 5)
    assert any(note.startswith("Replicated shards") for note in said.notes) is hybrid


@pytest.mark.parametrize(
    ("more", "stage"),
    [
        ({"fsdp": True}, 3),
        ({"fsdp": True, "fsdp_config": {1: 2, "version": 2, "reshard_after_forward": False}}, 2),
        ({"fsdp": ["auto_wrap"], "fsdp_config": {"fsdp_reshard_after_forward": "false"}}, 2),
        ({"fsdp": "shard_grad_op auto_wrap offload"}, 2),
        ({"fsdp": "no_shard", "fsdp_config": "fsdp.json"}, 0),
        ({"fsdp": ""}, None),
        ({"deepspeed": {"zero_optimization": {"stage": "2"}}}, 2),  # quotes do no harm
        ({"deepspeed": "ds.json"}, None),
    ],
)
def test_what_trainer_cuts(more, stage):
    said = read_settings(json.dumps({**TRAINER, "fsdp": None, **more}), "args.json")
    assert said.shard_stage == stage
    assert any("--shard-stage says its stage" in note for note in said.notes) is ("deepspeed" in more)


def test_what_of_the_cut_stands_elsewhere_is_said():
    for name, text in (
        ("default_config.json", '{"distributed_type": "DEEPSPEED"}'),
        ("default_config.json", '{"distributed_type": "MEGATRON_LM"}'),
        ("run.sh", "pretrain_gpt.py --micro-batch-size 4 --use-megatron-fsdp --bf16"),
        ("run.sh", "pretrain_gpt.py --micro-batch-size 4 --use-torch-fsdp2 --bf16"),
    ):
        said = read_settings(text, name)
        assert said.shard_stage is None
        assert any("they are taken as whole; --shard-stage says it" in note for note in said.notes)
    of_megatron = {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {"megatron_lm_use_distributed_optimizer": True},
    }
    assert read_settings(json.dumps(of_megatron), "default_config.json").shard_stage == 1


@pytest.mark.parametrize("size", [1, 4])
def test_the_ranks_of_ulysses_see_the_same_samples(size):
    table = {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": size}
    accelerated = {"parallelism_config_sp_size": size, "parallelism_config_cp_size": 2}
    for said, context in (
        (read_settings(json.dumps(table), "ds.json"), size),
        (read_settings(json.dumps({"distributed_type": "NO", "parallelism_config": accelerated}), "a.json"), 2 * size),
    ):
        assert said.context == context
        assert any("Ulysses" in note for note in said.notes) is (size > 1)


def test_a_batch_that_deepspeed_chooses_is_refused():
    elastic = {"max_train_batch_size": 2048, "micro_batch_sizes": [2, 4]}
    with pytest.raises(UsageError, match=r"ds\.json: elasticity is enabled: DeepSpeed chooses the batch itself"):
        read_settings(json.dumps({**DEEPSPEED, "elasticity": {"enabled": True, **elastic}}), "ds.json")
    off = {**DEEPSPEED, "elasticity": {"enabled": False, **elastic}}
    assert read_settings(json.dumps(off), "ds.json").global_batch == 2048


def test_auto_is_not_a_number_and_not_a_yes():
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    unknown = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    said = read_settings(json.dumps({**auto, **unknown}), "ds.json")
    assert (said.global_batch, said.micro_batch, said.accumulation) == (None, None, None)
    assert (said.precision, said.division) == (None, "before")
    assert [note.split(" ")[0] for note in said.notes] == ["auto:", "auto:"]
    half = read_settings(json.dumps({**auto, "fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}), "ds.json")
    assert half.precision == "fp16"
    alone = read_settings(json.dumps({"train_batch_size": 64}), "ds.json")
    assert alone.accumulation == 1


BRANCHES = """if [ "$SIZE" = 7B ]; then
  ARGS="--micro-batch-size 4 --global-batch-size 2048"
else
  ARGS="--micro-batch-size {other} --global-batch-size 2048"
fi
torchrun --nnodes 64 pretrain_gpt.py $ARGS --lr 1e-4 --fp16
torchrun --nnodes 1 evaluate.py $ARGS --lr 0
"""


def test_a_flag_of_another_branch_or_command_is_refused_where_it_says_something_else():
    with pytest.raises(UsageError, match=r"--micro-batch-size stands there with 4 and with 2, and which of them is"):
        read_settings(BRANCHES.format(other=2), "run.sh")
    said = read_settings(BRANCHES.format(other=4), "run.sh")
    assert (said.micro_batch, said.global_batch, said.precision) == (4, 2048, "fp16")


def test_a_flag_that_a_variable_names_is_refused():
    job = "run --micro-batch-size 4 --global-batch-size 2048"
    for flag in ("--${PREC}", '--"$PREC"', "--no-$PREC"):
        with pytest.raises(UsageError, match=r"which flag --\S*PREC\S* is, a shell's variable says"):
            read_settings(f'PREC="fp16"\nARGS="{job} {flag} --bf16"', "run.sh")
    assert read_settings(f'ARGS="{job}"\n{job} "--fp16" $PREC "${{MORE[@]}}" --lr=$LR', "run.sh").precision == "fp16"


def test_a_script_from_windows_is_read_as_any():
    script = "run --micro-batch-size 4 \\\n --tensor-model-parallel-size \\\n 2 --fp16 # once --fp32\n"
    said = read_settings(script.replace("\n", "\r\n"), "run.sh")
    assert (said.micro_batch, said.tensor, said.precision) == (4, 2, "fp16")
    assert said == read_settings(script, "run.sh")
