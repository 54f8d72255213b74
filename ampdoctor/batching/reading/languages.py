"""JSON and YAML as people write configurations, each refused in a sentence where a plan would be made of a guess."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ampdoctor.batching.reading.counts import shown
from ampdoctor.errors import UsageError
from ampdoctor.evidence.json_records import DuplicateKeyError, unique_keys

_BEYOND_JSON = re.compile(r"^\s*(//|#|/\*)|,\s*[}\]]", re.MULTILINE)
"""What hjson, by which DeepSpeed reads its configuration, allows beyond JSON."""
_MOST_PAIRS = 1 << 16
"""Keys of a YAML, merged ones counted wherever they are merged: nested ones multiply, and some lines make billions."""


def read_json(text: str, name: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        UsageError: It is none, or an object in it has one key twice.
    """
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
    """Returns the table of a YAML text.

    Raises:
        UsageError: It is none, PyYAML is not installed, or its merge keys (`<<`) make more of it than a file holds.
    """
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{name} is YAML, and PyYAML, which reads it, is not installed: pip install 'ampdoctor[yaml]'"
        ) from None

    class Bounded(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML says no types
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
    """Returns a file's value, which has to be a table.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {language}, and no table of settings")
    return value
