"""The files of a checkpoint, and which of them belong together: shards form one unit, any other file its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampdoctor.checkpoints.contents.structure import Sections, clean_names, main_model
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.checkpoints.storage.stored import StoredTensor


@dataclass(slots=True)
class Part:
    """One file's content.

    Attributes:
        file: The open file.
        sections: The parts of its contents.
        name: Path relative to what was opened.
        index: Name of the index that lists it as a shard; "" for a file of its own.
        beside: Further open files, if its tensors lie there.
    """

    file: RegularFile
    sections: Sections
    name: str
    index: str = ""
    beside: tuple[RegularFile, ...] = ()

    @property
    def files(self) -> tuple[RegularFile, ...]:
        """All of its files."""
        return (self.file, *self.beside)


class Unit:
    """Files whose state dicts are parts of the same models.

    Attributes:
        name: The index's or the file's name.
        parts: The files, in order.
        models: State dicts by their path in the file, the main one first; those of shards are merged.
        inner: True if the files lie in a folder inside the one that was opened.
        main: Path of the main model; None if the unit holds none.
        ordered: True if the entries are in the order of `named_parameters()`.
    """

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.inner = all("/" in part.name for part in parts)
        merged: dict[str, dict[str, StoredTensor]] = {}
        for part in parts:
            for path, model in part.sections.models.items():
                merged.setdefault(path, {}).update(model)
        self.main = main_model(list(merged))
        self.models = dict(sorted(merged.items(), key=lambda item: item[0] != self.main))
        self.ordered = all(part.sections.ordered for part in parts if part.sections.models)
        self._clean = {path: clean_names(list(model)) for path, model in merged.items()}

    def clean(self, path: str, name: str) -> str:
        """Returns a stored name as in `named_parameters()` of the bare model."""
        return self._clean[path][name]

    def twin_of(self, other: Unit) -> bool:
        """Is it just the safetensors of the same model that another format holds beside it?

        safetensors keeps only one name of a tied weight, so it may have fewer names.
        """
        alone = all(not p.sections.optimizers and not p.sections.scalers for u in (self, other) for p in u.parts)
        return alone and not self.ordered and other.ordered and self._outline().items() <= other._outline().items()

    def _outline(self) -> dict[str, tuple[int, ...]]:
        main = self.models[self.main] if self.main is not None else {}
        return {name: tensor.shape for name, tensor in main.items()}


def units_of(parts: Sequence[Part]) -> tuple[Unit, ...]:
    """Returns the parts grouped into units, in the order of their first part."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.index or part.name, []).append(part)
    return tuple(Unit(name, group) for name, group in groups.items())


def chosen_unit(units: Sequence[Unit]) -> Unit | None:
    """Returns the unit that holds a checkpoint's model; None if there is none, or if there are several different ones.

    Of twins it is the one in safetensors, which loaders prefer. A folder's own model goes before that of an inner
    folder (the Trainer gathers the model of a DeepSpeed run beside the partitions).
    """
    every = [unit for unit in units if unit.models]
    holders = sorted([unit for unit in every if not unit.inner] or every, key=lambda unit: unit.ordered)
    if len(holders) == 2 and holders[0].twin_of(holders[1]):
        return holders[0]
    return holders[0] if len(holders) == 1 else None
