"""A plan as a framework's settings: a fragment that runs as printed, and refuses to train with another batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from ampdoctor.batching.plans import BatchPlan, Cluster
from ampdoctor.evidence.report_scaler import EmittedSettings, Language
from ampdoctor.evidence.targets import PlanFramework

Fragment = tuple[Language, Sequence[str], tuple[str, ...]]  # its language, its lines, and notes


def emit_plan(plan: BatchPlan, cluster: Cluster, framework: PlanFramework) -> EmittedSettings:
    """Returns the fragment."""
    language, lines, notes = _EMITTERS[framework](plan, cluster)
    text = "".join(f"{line}\n" for line in lines)
    return EmittedSettings(framework=framework, language=language, text=text, notes=notes)


def _transformers(plan: BatchPlan, cluster: Cluster) -> Fragment:
    ranks = "args.world_size" + _shared(cluster)
    lines = (
        "from transformers import TrainingArguments",
        "",
        "args = TrainingArguments(",
        f"    per_device_train_batch_size={plan.micro_batch},",
        f"    gradient_accumulation_steps={plan.accumulation},",
        ")",
        f"assert args.train_batch_size * args.gradient_accumulation_steps * {ranks} == {plan.global_batch}",
    )
    notes = (
        f"with split_batches per_device_train_batch_size is that of all ranks: {plan.micro_batch * plan.data_parallel}",
        "the last line is no part of transformers, which never checks the product: it stops where ranks differ",
    )
    return "python", lines, notes


def _accelerate(plan: BatchPlan, cluster: Cluster) -> Fragment:
    ranks = "accelerator.num_processes" + _shared(cluster)
    lines = (
        "from accelerate import Accelerator",
        "from torch.utils.data import DataLoader",
        "",
        f"accelerator = Accelerator(gradient_accumulation_steps={plan.accumulation})",
        f"loader = accelerator.prepare(DataLoader(dataset, batch_size={plan.micro_batch}, shuffle=True))",
        f"assert {plan.micro_batch} * accelerator.gradient_accumulation_steps * {ranks} == {plan.global_batch}",
    )
    notes = (
        f"with split_batches=True the loader's batch is that of all ranks: {plan.micro_batch * plan.data_parallel}",
        "the last line is no part of Accelerate, which never checks the product: it stops where ranks differ",
        "under DeepSpeed the sizes of its configuration hold: emit for deepspeed",
    )
    return "python", lines, notes


def _lightning(plan: BatchPlan, cluster: Cluster) -> Fragment:
    lines = (
        "from lightning.pytorch import Trainer",
        "from torch.utils.data import DataLoader",
        "",
        f"loader = DataLoader(dataset, batch_size={plan.micro_batch}, shuffle=True)",
        f"trainer = Trainer(accumulate_grad_batches={plan.accumulation})",
        (
            f"assert {plan.micro_batch} * trainer.accumulate_grad_batches * trainer.world_size{_shared(cluster)} "
            f"== {plan.global_batch}"
        ),
    )
    notes = ("the last line is no part of Lightning, which never checks the product: it stops where ranks differ",)
    return "python", lines, notes


def _deepspeed(plan: BatchPlan, cluster: Cluster) -> Fragment:
    sizes = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
    }
    notes = ["with all three DeepSpeed's own assertion holds the product to the ranks"]
    if cluster.model_parallel > 1:
        notes.append("tensor and pipeline parallel ranks come from its mpu, topology or tensor_parallel section")
    return "json", json.dumps(sizes, indent=2).splitlines(), tuple(notes)


def _megatron(plan: BatchPlan, cluster: Cluster) -> Fragment:
    flags = {
        "micro-batch-size": plan.micro_batch,
        "global-batch-size": plan.global_batch,
        "tensor-model-parallel-size": cluster.tensor,
        "pipeline-model-parallel-size": cluster.pipeline,
        "context-parallel-size": cluster.context,
    }
    lines = (
        "BATCH_ARGS=(",
        *(f"    --{name} {value}" for name, value in flags.items()),
        ')  # then: pretrain_gpt.py ... "${BATCH_ARGS[@]}"',
    )
    notes = (f"Megatron-LM derives the accumulation, here {plan.accumulation}, and refuses a batch it cannot share",)
    return "shell", lines, notes


def _torchtitan(plan: BatchPlan, cluster: Cluster) -> Fragment:
    lines = (
        "[training]",
        f"local_batch_size = {plan.micro_batch}",
        f"global_batch_size = {plan.global_batch}",
        "",
        "[parallelism]",
        f"tensor_parallel_degree = {cluster.tensor}",
        f"pipeline_parallel_degree = {cluster.pipeline}",
        f"context_parallel_degree = {cluster.context}",
    )
    notes = (
        f"torchtitan derives the accumulation, here {plan.accumulation}, and refuses a batch it cannot share",
        (
            "for releases up to 0.2.2; 0.3 has no TOML and takes the same names as flags, "
            f"--training.local_batch_size {plan.micro_batch} --training.global_batch_size {plan.global_batch}"
        ),
    )
    return "toml", lines, notes


def _shared(cluster: Cluster) -> str:
    return f" // {cluster.model_parallel}" if cluster.model_parallel > 1 else ""


_EMITTERS: Mapping[PlanFramework, Callable[[BatchPlan, Cluster], Fragment]] = {
    "transformers": _transformers,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
}
