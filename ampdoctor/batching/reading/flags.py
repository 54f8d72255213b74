"""The flags of a shell script, or of a list of arguments. No variable is expanded, and no branch is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampdoctor.errors import UsageError

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_FLAG = re.compile(
    r"(?<![\w-])--(?P<name>[a-zA-Z0-9_-]+)(?:=|[ \t]+(?:\\\n\s*)?)?(?P<value>[^\s\\()=-][^\s\\()]*)?", re.ASCII
)
_LISTED = re.compile(r"""--[a-z0-9_-]+(=[^\s"',]*)?["']\s*,""")
"""A flag in quotes with a comma behind it, as in Python and JSON."""
_NAMED = re.compile(r"""(?<![\w-])--(?:["']|[\w-]+)?\$[^\s"']*""")
"""A flag whose name, or part of it, is a variable's."""
_WORDS: Mapping[str, bool] = {"true": True, "false": False}
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
"""Megatron-LM's and Trainer's flags whose value a plan is made of: of these there has to be one."""


def flags_in(text: str, name: str) -> dict[str, str | bool]:
    """Returns the flags of a shell script.

    Raises:
        UsageError: A variable names a flag, one that counts has several values (another command's, another branch's),
            or they are items of a list in some other language, which nothing here reads.
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
            continue  # spoken of, as where a script takes its arguments apart
        if flag in _COUNTED and found.get(flag, value) != value:
            raise UsageError(
                f"{name}: --{one['name']} stands there with {found[flag]} and with {value}, and which of them is in "
                "force is not known here"
            )
        found[flag] = value
    return found


def flags_of(arguments: list[Any]) -> dict[str, str | bool]:
    """Returns the flags of a list of arguments, as a program gets them; the last of several of one name."""
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
    return _WORDS.get(word.lower(), word or True)
