"""Reads and checks values of a configuration; `name` is always the file, for error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampdoctor.batching.plans import STAGES, Precision
from ampdoctor.errors import UsageError
from ampdoctor.evidence.json_records import DuplicateKeyError, unique_keys

_UNSAID = (None, "auto", -1)  # "not given": DeepSpeed's and transformers' "auto", torchtitan's -1
_DIGITS = 20  # of a quoted number: no batch has more
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_SHOWN = 60  # characters of a value in a sentence


def count(table: Mapping[str, Any], key: str, name: str) -> int | None:
    """Returns a whole number of at least 1, or None if it is not given; raises UsageError for other values."""
    value = table.get(key)
    if isinstance(value, bool) or (value not in _UNSAID and not _whole(value)):
        raise UsageError(f"{name}: {key} is a whole number of at least 1, not {shown(value)}")
    return None if value in _UNSAID else int(value)


def yes(table: Mapping[str, Any], key: str, name: str) -> bool | None:
    """Returns whether something is switched on; False if not given, and None for "auto", which another file decides.

    Raises UsageError for other values.
    """
    value = table.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text == "auto":
        return None
    if text not in _WORDS:
        raise UsageError(f"{name}: {key} is true or false, not {shown(value)}")
    return _WORDS[text]


def half_of(name: str, *, fp16: bool | None, bf16: bool | None) -> Precision | None:
    """Returns the format of two switches; None if unknown.

    Raises UsageError where both are on, with which no framework starts.
    """
    if fp16 and bf16:
        raise UsageError(f"{name}: fp16 and bf16 are both on, and a job has one of them")
    return "fp16" if fp16 else "bf16" if bf16 else None if None in (fp16, bf16) else "fp32"


def table_in(table: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Returns a nested table, {} if it is missing; raises UsageError for another value."""
    value = table.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: {key} is a table, not {shown(value)}")
    return value


def word(table: Mapping[str, Any], key: str, default: str) -> str:
    """Returns a word in lower case; for another value its type."""
    value = table.get(key)
    return default if value is None else value.lower() if isinstance(value, str) else shown(value)


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


# -- flags of a shell script, or a list of arguments; variables are not expanded, branches not evaluated --


_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_FLAG = re.compile(
    r"(?<![\w-])--(?P<name>[a-zA-Z0-9_-]+)(?:=|[ \t]+(?:\\\n\s*)?)?(?P<value>[^\s\\()=-][^\s\\()]*)?", re.ASCII
)
_LISTED = re.compile(r"""--[a-z0-9_-]+(=[^\s"',]*)?["']\s*,""")
"""A flag in quotes before a comma, as in Python and JSON."""
_NAMED = re.compile(r"""(?<![\w-])--(?:["']|[\w-]+)?\$[^\s"']*""")  # a flag whose name contains a variable
_FLAG_WORDS: Mapping[str, bool] = {"true": True, "false": False}
_COUNTED = frozenset(
    {
        "micro_batch_size",
        "global_batch_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_distributed_optimizer_instances",
        "data_parallel_sharding_strategy",
        "per_device_train_batch_size",
        "per_gpu_train_batch_size",
        "gradient_accumulation_steps",
    }
)
"""Flags of Megatron-LM and Trainer that a plan depends on: each must have one value."""


def flags_in(text: str, name: str) -> dict[str, str | bool]:
    """Returns the flags of a shell script.

    Raises UsageError where a variable names a flag, a relevant flag has several values (of another command or branch),
    or the flags are items of a list in another language.
    """
    script = _COMMENT.sub("", text.replace("\r\n", "\n"))
    if _LISTED.search(script):
        raise UsageError(
            f"{name} lists arguments in quotes and commas: a JSON list is read, and a shell script's flags"
        )
    named = _NAMED.search(script)
    if named is not None:
        raise UsageError(f"{name}: which flag {named[0]} is, a shell's variable says, whose value is not known here")
    found: dict[str, str | bool] = {}
    for one in _FLAG.finditer(script):
        flag, value = one["name"].replace("-", "_"), _value(one["value"])
        if flag in _COUNTED and value is True:
            continue  # only mentioned, as where a script parses its arguments
        if flag in _COUNTED and found.get(flag, value) != value:
            raise UsageError(
                f"{name}: --{one['name']} stands there with {found[flag]} and with {value}, and which of them is in "
                "force is not known here"
            )
        found[flag] = value
    return found


def flags_of(arguments: list[Any]) -> dict[str, str | bool]:
    """Returns the flags of an argument list; of several with one name the last."""
    found: dict[str, str | bool] = {}
    flag = ""
    for one in map(str, arguments):
        if one.startswith("--"):
            flag, _, value = one.removeprefix("--").partition("=")
            flag = flag.replace("-", "_")
            found[flag] = value or True
        elif found.get(flag) is True:
            found[flag] = one
    return found


def _value(text: str | None) -> str | bool:
    word = (text or "").strip("\"'")
    return _FLAG_WORDS.get(word.lower(), word or True)


# -- JSON and YAML as people write them; ambiguous files are refused --


_BEYOND_JSON = re.compile(r"^\s*(//|#|/\*)|,\s*[}\]]", re.MULTILINE)
"""What hjson, DeepSpeed's parser, allows beyond JSON."""
_MOST_PAIRS = 1 << 16
"""Most keys of a YAML, with merged ones wherever they are merged: nested merges multiply to billions in a few lines."""


def read_json(text: str, name: str) -> Any:
    """Parses a JSON text; raises UsageError where it is none, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKeyError as error:
        raise UsageError(f"{name}: the key {shown(error.key)} stands twice in one table") from None
    except json.JSONDecodeError:
        beyond = ": comments and commas before a bracket are not read" if _BEYOND_JSON.search(text) else ""
        raise UsageError(f"{name} is not JSON{beyond}") from None
    except ValueError:
        raise UsageError(f"{name}: a number in it has thousands of digits") from None
    except RecursionError:
        raise UsageError(f"{name} is nested too deep to be a configuration") from None


def yaml_table(text: str, name: str) -> Mapping[str, Any]:
    """Parses a YAML table; raises UsageError for other text, without PyYAML, or if merges (`<<`) make too many keys."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{name} is YAML, and PyYAML, which reads it, is not installed: pip install 'ampdoctor[yaml]'"
        ) from None

    class Bounded(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        pairs = 0

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            self.pairs += len(node.value)
            if self.pairs > _MOST_PAIRS:
                raise UsageError(f"{name} has more than {_MOST_PAIRS} keys, or makes them by merging (<<)")

    try:
        return table_of(yaml.load(text, Bounded), name, "YAML")  # noqa: S506 - it is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{name} is not YAML") from None


def table_of(value: Any, name: str, language: str) -> Mapping[str, Any]:
    """Returns a file's value; raises UsageError if it is no table."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {language}, and no table of settings")
    return value


# -- which states ZeRO and FSDP shard --
#
# Sources: accelerate 1.15 (`FullyShardedDataParallelPlugin`) and transformers 5.23 (`_process_fsdp_args`).


STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""FSDP's, in the order in which accelerate and torch number them from 1, and the ZeRO stage that shards as much."""
_RESHARDS = {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}
"""FSDP2's switch instead of a strategy: are gathered parameters freed between forward and backward?"""
_BESIDE = ("offload", "auto_wrap")  # further words in Trainer's `fsdp`

REPLICATED = "Replicated shards: --shard-stage sizes states as if all ranks shared one copy."
"""For a number of replicas: each is a copy, and it is unknown whether their number should stay."""

ULYSSES = "Ulysses' sequence parallel ranks see the same samples: they are counted as context parallel (--cp)."
"""For DeepSpeed's `sequence_parallel_size`, which divides the ranks; these ranks share the states too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How states are sharded."""

    stage: int | None = None  # as in ZeRO; None: not sharded, or unknown
    within_node: bool = False  # only the devices of a node share a copy
    notes: tuple[str, ...] = ()  # what is unknown, a sentence each


def zero_stage(table: Mapping[str, Any], key: str, name: str) -> int | None:
    """Returns a ZeRO stage, if given; raises UsageError for an unknown one."""
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value) in map(str, STAGES):
        return int(value)
    raise UsageError(f"{name}: {key} is 0, 1, 2 or 3, not {shown(value)}")


def fsdp_of_accelerate(fsdp: Mapping[str, Any], name: str) -> Cut:
    """Reads Accelerate's `fsdp_config`; raises UsageError for an unknown strategy."""
    switch = count(fsdp, "fsdp_version", name) == 2
    key = "fsdp_reshard_after_forward" if switch else "fsdp_sharding_strategy"
    return _cut(fsdp.get(key), key, name)


def fsdp_of_trainer(table: Mapping[str, Any], name: str) -> Cut:
    """Reads Trainer's `fsdp` and `fsdp_config`; raises UsageError for an unknown word."""
    fsdp = table.get("fsdp")
    if not fsdp:
        return Cut()
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    if not isinstance(fsdp, str | list | bool):
        raise UsageError(f"{name}: fsdp is true, or words, not {shown(fsdp)}")
    strategy = next((word for word in words if word not in _BESIDE), None)
    if isinstance(table.get("fsdp_config"), str):
        kept = _cut(strategy, "fsdp", name)
        note = (
            f"fsdp_config is a file of its own, which is not read: states are taken to be cut as stage {kept.stage} "
            "cuts them; --shard-stage says otherwise."
        )
        return Cut(stage=kept.stage, within_node=kept.within_node, notes=(note,))
    more = {str(key).removeprefix("fsdp_"): value for key, value in table_in(table, "fsdp_config", name).items()}
    reshard = more.get("reshard_after_forward")
    return _cut(strategy, "fsdp", name) if reshard is None else _cut(reshard, "reshard_after_forward", name)


def _cut(strategy: Any, key: str, name: str) -> Cut:
    """Reads a strategy: its name, its number or FSDP2's switch; by default, everything is sharded."""
    text = "FULL_SHARD" if strategy is None else str(strategy) if isinstance(strategy, str | int) else ""
    known = _RESHARDS.get(text.lower(), text.upper())
    if known in map(str, range(1, len(STRATEGIES) + 1)):
        known = list(STRATEGIES)[int(known) - 1]
    if known not in STRATEGIES:
        raise UsageError(f"{name}: {key} is one of {', '.join(STRATEGIES)}, not {shown(strategy)}")
    return Cut(stage=STRATEGIES[known], within_node=known.startswith("HYBRID"))
