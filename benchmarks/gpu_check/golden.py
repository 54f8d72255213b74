"""Golden files: what one GPU answered with one version of torch, for machines that have none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampdoctor.errors import UsageError

SCHEMA = 1
FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """What a device answered.

    Attributes:
        device: Its name, as torch gives it.
        torch: torch's version.
        sections: Rows by part (`Section.rows`).
        schema: Of the file.
    """

    device: str
    torch: str
    sections: Mapping[str, Mapping[str, Any]]
    schema: int = SCHEMA

    @property
    def file_name(self) -> str:
        """Device and version of torch, without the build: nvidia-h200-2.13.0.json."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"{slug}-{self.torch.partition('+')[0]}.json"


def files(folder: Path = FOLDER) -> list[Path]:
    """Every golden file, sorted; none where no GPU was at hand yet."""
    return sorted(folder.glob("*.json"))


def read(path: Path) -> Golden:
    """Read a golden file.

    Raises:
        UsageError: It is of another schema.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise UsageError(f"{path.name} has schema {data.get('schema')}, and only {SCHEMA} is known: measure it again")
    return Golden(**data)


def write(golden: Golden, folder: Path) -> Path:
    """Write the file; parts that were not measured this time stay as an earlier run of the same build left them."""
    path = folder / golden.file_name
    sections = dict(golden.sections)
    if path.exists():
        before = read(path)
        sections = {**before.sections, **sections} if before.torch == golden.torch else sections
    data = {**asdict(golden), "sections": sections}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(data), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def _rounded(value: Any) -> Any:
    """Floats of six digits: what is exact is an integer, a name or a digest."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
