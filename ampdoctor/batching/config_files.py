"""Reads the batch from a framework's configuration; the keys decide which framework it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from ampdoctor.batching.plans import STAGES, BatchSettings, GradReduceScaling, Precision
from ampdoctor.errors import UsageError
from ampdoctor.evidence.json_records import DuplicateKeyError, unique_keys

# -- values of a configuration; every reader raises UsageError for an invalid one --

_UNSAID = (None, "auto")  # "not given": "auto" is DeepSpeed's and transformers'
_DIGITS = 20  # of a quoted number: no batch has more
_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": False, "auto": None}
_SHOWN = 60  # characters of a value in a sentence


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a configuration; `name` is the file, for error messages."""

    values: Mapping[str, Any]
    name: str

    def get(self, key: str) -> Any:
        """Returns a value as it is; None if it is missing."""
        return self.values.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def count(self, key: str) -> int | None:
        """Returns a whole number of at least 1, or None if it is not given."""
        value = self.get(key)
        if isinstance(value, bool) or (value not in _UNSAID and not _whole(value)):
            raise UsageError(f"{self.name}: {key} is a whole number of at least 1, not {shown(value)}")
        return None if value in _UNSAID else int(value)

    def yes(self, key: str) -> bool | None:
        """Returns whether something is on; False if not given, and None for "auto", which another file decides."""
        word = str(self.get(key)).lower()
        if word not in _WORDS:
            raise UsageError(f"{self.name}: {key} is true or false, not {shown(self.get(key))}")
        return _WORDS[word]

    def table(self, key: str) -> Table:
        """Returns a nested table, an empty one if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{self.name}: {key} is a table, not {shown(value)}")
        return Table(value or {}, self.name)

    def word(self, key: str, default: str) -> str:
        """Returns a word in lower case; for another value its type."""
        value = self.get(key)
        return default if value is None else value.lower() if isinstance(value, str) else shown(value)

    def half(self, *, fp16: bool | None, bf16: bool | None) -> Precision | None:
        """Returns the format of two switches; None if unknown. With both on, no framework starts."""
        if fp16 and bf16:
            raise UsageError(f"{self.name}: fp16 and bf16 are both on, and a job has one of them")
        return "fp16" if fp16 else "bf16" if bf16 else None if None in (fp16, bf16) else "fp32"

    def zero_stage(self, key: str, of: str = "") -> int | None:
        """Returns a ZeRO stage, if given; `of` is the table that it is in, for the error message."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value) in map(str, STAGES):
            return int(value)
        raise UsageError(f"{self.name}: {of}{key} is 0, 1, 2 or 3, not {shown(value)}")


def shown(value: Any) -> str:
    """Formats a value; lists and tables only by type, as YAML's aliases make small ones enormous."""
    if isinstance(value, str | int | float | None):
        return repr(value)[:_SHOWN]
    return "a table" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else type(value).__name__


def _whole(value: Any) -> bool:
    """Whether it is a whole number from 1 on; YAML and flags give text where the user wrote quotes."""
    if isinstance(value, str):
        return value.isdecimal() and len(value) < _DIGITS and int(value) >= 1
    return isinstance(value, int) and value >= 1


# -- which states FSDP shards; sources: accelerate 1.15 (`FullyShardedDataParallelPlugin`), transformers 5.23 --

STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""FSDP's, in the order in which accelerate and torch number them from 1, and the ZeRO stage that shards as much;
the hybrid ones cut over a node alone."""
_RESHARDS = {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}
"""FSDP2's switch instead of a strategy: are gathered parameters freed between forward and backward?"""
_BESIDE = ("offload", "auto_wrap")  # further words in Trainer's `fsdp`

REPLICATED = "Replicated shards: --shard-stage sizes states as if all ranks shared one copy."
"""For a number of replicas: each is a copy, and it is unknown whether their number should stay."""

ULYSSES = "Ulysses' sequence parallel ranks see the same samples: they are counted as context parallel (--cp)."
"""For DeepSpeed's `sequence_parallel_size`, which divides the ranks; these ranks share the states too."""


def _cut(strategy: Any, key: str, name: str) -> tuple[int, list[str]]:
    """Reads a strategy: its name, its number or FSDP2's switch; gives the stage as in ZeRO, and notes."""
    text = "FULL_SHARD" if strategy is None else str(strategy) if isinstance(strategy, str | int) else ""
    known = _RESHARDS.get(text.lower(), text.upper())
    if known in map(str, range(1, len(STRATEGIES) + 1)):
        known = list(STRATEGIES)[int(known) - 1]
    if known not in STRATEGIES:
        raise UsageError(f"{name}: {key} is one of {', '.join(STRATEGIES)}, not {shown(strategy)}")
    return STRATEGIES[known], [REPLICATED] if known.startswith("HYBRID") else []


# -- Trainer arguments of transformers, and Accelerate's configuration --
#
# Sources: transformers 5.23 (`training_args.py`) and accelerate 1.15 (`commands/config/config_args.py`).

_DEFAULT_SIZE = 8
_TOKENS = (
    "Trainer divides by the step's tokens only if the model takes num_items_in_batch or compute_loss_func is given; "
    "elsewhere it takes the mean of each micro-batch."
)
_DEEPSPEED_SIZES = "deepspeed: the sizes in its configuration have to be these, or auto; --shard-stage says its stage."


def _trainer_arguments(table: Table) -> BatchSettings:
    """Reads `TrainingArguments`, with the library's defaults."""
    precision = table.half(fp16=table.yes("fp16"), bf16=table.yes("bf16"))
    deepspeed = table.get("deepspeed")
    sharded = bool(table.get("fsdp"))
    stage, hybrid = _fsdp_of_trainer(table) if sharded else (None, [])
    notes = [_TOKENS, *hybrid]
    if isinstance(deepspeed, Mapping):
        stage = table.table("deepspeed").table("zero_optimization").zero_stage("stage")
    if deepspeed:
        notes.append(_DEEPSPEED_SIZES)
    size = table.count("per_device_train_batch_size") or table.count("per_gpu_train_batch_size")
    if size is None:
        size = _DEFAULT_SIZE
        notes.append(f"per_device_train_batch_size is not given: {size}, as Trainer takes it.")
    steps = table.count("gradient_accumulation_steps") or 1
    # until transformers 4.38 it was an argument of its own
    shared = bool(table.table("accelerator_config").yes("split_batches") or table.yes("split_batches"))
    return BatchSettings(
        framework="transformers",
        global_batch=size * steps if shared else None,
        micro_batch=None if shared else size,
        accumulation=steps,
        shard_stage=stage,
        precision=precision,
        reduction="tokens",
        division=_trainer_division(precision, sharded=sharded, elsewhere=bool(deepspeed)),
        notes=tuple(notes),
    )


def _fsdp_of_trainer(table: Table) -> tuple[int, list[str]]:
    fsdp = table.get("fsdp")
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    if not isinstance(table.get("fsdp_config"), str):  # else it is a file of its own
        config = {str(key).removeprefix("fsdp_"): value for key, value in table.table("fsdp_config").values.items()}
        if (reshard := config.get("reshard_after_forward")) is not None:
            return _cut(reshard, "reshard_after_forward", table.name)
    return _cut(next((word for word in words if word not in _BESIDE), None), "fsdp", table.name)


def _accelerate(table: Table) -> BatchSettings:
    """Reads the output of `accelerate config`; the micro-batch is not in it: it is the data loader's."""
    fsdp, parallel = table.table("fsdp_config"), table.table("parallelism_config")
    deepspeed, megatron = table.table("deepspeed_config"), table.table("megatron_lm_config")
    mixed = table.word("mixed_precision", "no")
    if mixed not in ("no", "fp16", "bf16", "fp8"):
        raise UsageError(f"{table.name}: mixed_precision is no, fp16, bf16 or fp8, not {mixed}")
    precision: Precision = {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}.get(mixed, "fp32")  # type: ignore[assignment]
    kind = table.word("distributed_type", "no")
    sharded = bool(fsdp.values) or kind == "fsdp"
    notes = [
        "An Accelerate configuration says neither the data loader's batch nor its split_batches: --micro-batch does."
    ]
    stage: int | None
    if sharded:
        key = "fsdp_reshard_after_forward" if fsdp.count("fsdp_version") == 2 else "fsdp_sharding_strategy"
        stage, hybrid = _cut(fsdp.get(key), key, table.name)
        notes += hybrid
    else:
        stage = 1 if megatron.yes("megatron_lm_use_distributed_optimizer") else deepspeed.zero_stage("zero_stage")
    if stage is None and kind in ("deepspeed", "megatron_lm"):
        notes.append(f"How {kind} cuts the states stands elsewhere: they are taken as whole; --shard-stage says it.")
    if (parallel.count("parallelism_config_dp_replicate_size") or 1) > 1:
        notes.append(REPLICATED)
    sequence, context = (parallel.count(f"parallelism_config_{of}_size") or 1 for of in ("sp", "cp"))
    if sequence > 1:
        notes.append(ULYSSES)
    elsewhere = bool(deepspeed.values or megatron.values)
    return BatchSettings(
        framework="accelerate",
        devices=table.count("num_processes"),
        context=context * sequence,
        shard_stage=stage,
        precision=precision,
        division=_trainer_division(precision, sharded=sharded, elsewhere=elsewhere),
        notes=tuple(notes),
        accumulation=deepspeed.count("gradient_accumulation_steps"),
        tensor=megatron.count("megatron_lm_tp_degree") or parallel.count("parallelism_config_tp_size"),
        pipeline=megatron.count("megatron_lm_pp_degree"),
    )


def _trainer_division(
    precision: Precision | None, *, sharded: bool, elsewhere: bool
) -> GradReduceScaling | Literal["none"] | None:
    """Under autocast DDP reduces the fp32 gradients of fp32 parameters; FSDP in its mixed precision's dtype."""
    if precision != "fp16":
        return "none"
    return None if elsewhere else "split" if sharded else "none"


# -- DeepSpeed's configuration; source: deepspeed 0.19.8 (`runtime/config.py`, `runtime/engine.py`) --

_SIZES = {
    "global_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


def _deepspeed(table: Table) -> BatchSettings:
    """Reads the configuration; two of the three sizes determine the third, as in DeepSpeed."""
    if table.table("elasticity").yes("enabled"):
        raise UsageError(
            f"{table.name}: elasticity is enabled: DeepSpeed chooses the batch itself, and there is none to keep"
        )
    zero = table.table("zero_optimization")
    stage = zero.zero_stage("stage", "zero_optimization: ") or 0
    fp16, bf16 = (table.table(half).yes("enabled") for half in ("fp16", "bf16"))
    sizes: dict[str, Any] = {field: table.count(key) for field, key in _SIZES.items()}
    filled = [key for key in _SIZES.values() if table.get(key) == "auto"]
    if sizes["accumulation"] is None and not filled and None in (sizes["global_batch"], sizes["micro_batch"]):
        sizes["accumulation"] = 1  # DeepSpeed's default where only one size is given
    notes = []
    if filled:
        notes.append(f"auto: Trainer or Accelerate fills in {', '.join(filled)}, and here the command line does.")
    if fp16 is None or bf16 is None:
        notes.append("auto: whether it is fp16 or bf16 stands in Trainer's arguments, and --precision says it.")
    sequence = table.count("sequence_parallel_size")
    if sequence is not None and sequence > 1:
        notes.append(ULYSSES)
    division: GradReduceScaling | Literal["none"] = "after"
    if fp16 is False or table.word("communication_data_type", "fp16") != "fp16":
        division = "none"
    elif stage == 3 or (stage and zero.values.get("reduce_scatter", True)) or table.get("prescale_gradients"):
        division = "before"
    return BatchSettings(
        framework="deepspeed",
        tensor=table.table("tensor_parallel").count("autotp_size"),
        context=sequence,
        shard_stage=stage,
        precision=table.half(fp16=fp16, bf16=bf16),
        division=division,
        notes=tuple(notes),
        **sizes,
    )


# -- Megatron-LM's arguments, from a script's flags or its YAML; source: its `training/arguments.py` --


def _megatron(table: Table) -> BatchSettings:
    """Reads flags, or the keys of a YAML, with underscores; a shell's variable is no number."""
    parallel = Table({**table.table("model_parallel").values, **table.values}, table.name)
    for key, value in parallel.values.items():
        if isinstance(value, str) and "$" in value and key.endswith(("batch_size", "parallel_size")):
            raise UsageError(f"{table.name}: {key} is the shell's {value}, whose value is not known here")
    micro = table.count("micro_batch_size")
    if micro is None:
        raise UsageError(f"{table.name}: Megatron-LM does not start without a micro-batch-size")
    if "gradient_accumulation_steps" in table and "global_batch_size" not in table:
        raise UsageError(
            f"{table.name}: micro_batch_size beside gradient_accumulation_steps is neither Megatron-LM's nor "
            "Trainer's: say them by --micro-batch and --accumulation"
        )
    notes = []
    if table.get("rampup_batch_size"):
        notes.append("rampup-batch-size: the plan is for the batch at its end; each one on the way has to divide too.")
    if (table.count("num_distributed_optimizer_instances") or 1) > 1:
        notes.append(REPLICATED)
    sharded = any(key.endswith(("_fsdp", "_fsdp2")) and _on(table, key) for key in table.values)
    if sharded:
        notes.append("How FSDP cuts the states is not read: they are taken as whole; --shard-stage says it.")
    precision = table.half(fp16=_on(parallel, "fp16"), bf16=_on(parallel, "bf16"))
    fp32_reduce = _on(table, "accumulate_allreduce_grads_in_fp32")
    return BatchSettings(
        framework="megatron",
        micro_batch=micro,
        accumulation=None if table.get("global_batch_size") else 1,
        shard_stage=None if sharded else int(_on(table, "use_distributed_optimizer")),
        precision=precision,
        reduction="sum" if _on(table, "calculate_per_token_loss") else "mean",
        division="before" if precision == "fp16" and not fp32_reduce else "none",
        notes=tuple(notes),
        global_batch=table.count("global_batch_size"),
        tensor=parallel.count("tensor_model_parallel_size"),
        pipeline=parallel.count("pipeline_model_parallel_size"),
        context=parallel.count("context_parallel_size"),
    )


def _on(table: Table, key: str) -> bool:
    """Whether a switch is there; the word after it is not its value, but the script's next word."""
    return str(table.get(key)).lower() not in ("none", "false")


# -- flags of a shell script; variables are not expanded, branches not evaluated --

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_FLAG = re.compile(
    r"(?<![\w-])--(?P<name>[a-zA-Z0-9_-]+)(?:=|[ \t]+(?:\\\n\s*)?)?(?P<value>[^\s\\()=-][^\s\\()]*)?", re.ASCII
)
_NAMED = re.compile(r"""(?<![\w-])--(?:["']|[\w-]+)?\$[^\s"']*""")  # a flag whose name contains a variable
_COUNTED = frozenset(
    {
        *("micro_batch_size", "global_batch_size", "num_distributed_optimizer_instances"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("gradient_accumulation_steps", "per_device_train_batch_size", "per_gpu_train_batch_size"),
    }
)
"""Flags of Megatron-LM and Trainer that a plan depends on: each must have one value."""


def flags_in(text: str, name: str) -> dict[str, str | bool]:
    """Returns a shell script's flags; UsageError where a variable names one, or a relevant one has several values."""
    script = _COMMENT.sub("", text.replace("\r\n", "\n"))
    named = _NAMED.search(script)
    if named is not None:
        raise UsageError(f"{name}: which flag {named[0]} is, a shell's variable says, whose value is not known here")
    found: dict[str, str | bool] = {}
    for one in _FLAG.finditer(script):
        flag, word = one["name"].replace("-", "_"), (one["value"] or "").strip("\"'")
        value = {"true": True, "false": False}.get(word.lower(), word or True)
        if flag in _COUNTED and value is True:
            continue  # only mentioned, as where a script parses its arguments
        if flag in _COUNTED and found.get(flag, value) != value:
            raise UsageError(
                f"{name}: --{one['name']} stands there with {found[flag]} and with {value}, and which of them is in "
                "force is not known here"
            )
        found[flag] = value
    return found


# -- JSON and YAML as people write them; ambiguous files are refused --


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKeyError as error:
        raise UsageError(f"{name}: the key {shown(error.key)} stands twice in one table") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is not JSON (comments, and commas before a bracket, are not read)") from None


def _yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{name} is YAML, and PyYAML, which reads it, is not installed: pip install 'ampdoctor[yaml]'"
        ) from None

    if "<<" in text:  # nested merges multiply to billions of keys in a few lines
        raise UsageError(f"{name} merges keys (<<), which is not read")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{name} is not YAML") from None


_LANGUAGES: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    ".json": ("JSON", _json),
    ".yaml": ("YAML", _yaml),
    ".yml": ("YAML", _yaml),
}
_READERS: Mapping[str, Callable[[Table], BatchSettings]] = {
    "train_batch_size": _deepspeed,
    "train_micro_batch_size_per_gpu": _deepspeed,
    "zero_optimization": _deepspeed,
    "per_device_train_batch_size": _trainer_arguments,
    "distributed_type": _accelerate,
    "micro_batch_size": _megatron,
    "gradient_accumulation_steps": _trainer_arguments,
    "output_dir": _trainer_arguments,
}
"""The first of these keys that a table has decides who reads it."""
_OF_FLAGS = ("per_device_train_batch_size", "micro_batch_size")  # by which a program's flags are recognised
_KNOWN = "a DeepSpeed JSON, Megatron-LM's arguments, Trainer arguments in JSON or YAML, or an Accelerate YAML"


def read_settings(text: str, name: str) -> BatchSettings:
    """Reads the batch in force from a configuration's text.

    The ending of `name` decides the language; without one of JSON or YAML it is a script with flags. Raises
    UsageError where it cannot be read, is of no known kind, or makes no sense.
    """
    ending = PurePath(name).suffix.lower()
    if ending not in _LANGUAGES and text.lstrip()[:1] != "{":
        return _read(Table(flags_in(text, name), name), _OF_FLAGS)
    language, parse = _LANGUAGES.get(ending, _LANGUAGES[".json"])
    values = parse(text, name)
    if not isinstance(values, Mapping):
        raise UsageError(f"{name} is {language}, and no table of settings")
    return _read(Table(values, name), _READERS)


def _read(table: Table, keys: Iterable[str]) -> BatchSettings:
    for key in keys:
        if key in table:
            return _READERS[key](table)
    raise UsageError(f"{table.name} says nothing of a batch: it is none of {_KNOWN}")
