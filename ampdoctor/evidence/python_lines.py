"""Lines of Python for users to paste. Names in them come from files that others wrote: they must stay inert."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 88
"""A call of at most this many columns stays on one line: formatters use it, and it fits a terminal with an indent."""

_EXACT_INTEGERS = 2.0**53
"""A whole float below this is exactly that integer; above, digits would be made up."""


def quoted(text: str) -> str:
    """Returns a string literal in printable ASCII, whatever `text` holds."""
    return json.dumps(text) if text.isascii() and text.isprintable() else ascii(text)


def literal(value: Any) -> str:
    """Returns an ASCII literal of a string, a number, None, or a mapping or sequence of such."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def exact(number: float) -> str:
    """Returns a number with all its digits, for a setting that will be copied: `16777216`, never `1.67772e+07`."""
    whole = float(number)
    return str(int(whole)) if whole.is_integer() and abs(whole) < _EXACT_INTEGERS else repr(whole)


def fitting(before: str, value: Any, after: str) -> tuple[str, ...]:
    """Returns a literal between two texts, on one line if it fits; the items of a long list fill lines of their own."""
    line = f"{before}{literal(value)}{after}"
    if len(line) <= _WIDTH or isinstance(value, str) or not isinstance(value, Sequence):
        return (line,)
    lines: list[str] = []
    for item in value:
        said = f"{literal(item)},"
        if lines and len(lines[-1]) + 1 + len(said) <= _WIDTH:
            lines[-1] += f" {said}"
        else:
            lines.append(f"    {said}")
    return (f"{before}[", *lines, f"]{after}")


def keywords(arguments: Mapping[str, Any]) -> list[str]:
    """Returns `name=literal` for each argument."""
    return [f"{name}={literal(value)}" for name, value in arguments.items()]


def call(before: str, arguments: Sequence[str], after: str = ")") -> tuple[str, ...]:
    """Returns a call on one line if it fits, else with a line for each argument.

    `before` ends with the opening bracket, `after` begins with the closing one.
    """
    line = before + ", ".join(arguments) + after
    if len(line) <= _WIDTH:
        return (line,)
    return (before, *(f"    {argument}," for argument in arguments), after)


def apply_call(kind: str, value: Any, *, status: str | None = None, arguments: str = "") -> tuple[str, ...]:
    """Returns the import and the call of `ampdoctor.apply` on the user's `model` for a prescription.

    `status` is None for a change that counts as verified. Further `arguments` come each after a comma.
    """
    end = "" if status is None else f', "status": {quoted(status)}'
    start = f'ampdoctor.apply(model, {{"kind": {quoted(kind)}, "value": '
    head = f"{start}{literal(value)}{end}}},"
    if arguments and len(head) <= _WIDTH < len(head) + len(arguments):
        return ("import ampdoctor", head, f"    {arguments.removeprefix(', ')})")
    return ("import ampdoctor", *fitting(start, value, f"{end}}}{arguments})"))


def autocast_step(device: str, dtype: str, comment: str = "") -> tuple[str, ...]:
    """Returns a training step under torch's autocast without a loss scaler; the names are the user's own.

    `dtype` is torch's name of the compute format; "float32" is a step without autocast. `comment` is put beside the
    opening of the autocast region.
    """
    step = ("loss.backward()  # without a GradScaler", "optimizer.step()")
    if dtype == "float32":
        return ("loss = loss_fn(model, batch)  # without torch.autocast", *step)
    opening = f"with torch.autocast({quoted(device)}, dtype=torch.{dtype}):"
    return (f"{opening}  # {comment}" if comment else opening, "    loss = loss_fn(model, batch)", *step)
