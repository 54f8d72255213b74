"""Chooses which checkpoints of many are read: enough to find the first sick one, or to see a trend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ampdoctor.bisect.first_bad import first_bad
from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.family import Member
from ampdoctor.diagnosis.scaler.collapsed_scaler import RULE as COLLAPSED
from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.of_checkpoints.tensor_rows import TensorRows
from ampdoctor.evidence.report import Report, Skipped, with_files
from ampdoctor.workflows.opening.request import SetAside, keep_all
from ampdoctor.workflows.scanning.examining import Examined

_STATE = ("state:", "optimizer_state:", "scaler_state")
"""Ops of findings about a checkpoint's own values; findings from a log beside them are about earlier steps."""

MAX_UNDATED = 4
"""Maximum number of members of unknown time that are read unasked: a run ships its averaged and its best weights,
and there are few of them."""

Look = Callable[[Checkpoint, str], Examined]
"""Examines a member, given its name."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A member that was opened.

    Attributes:
        member: The member.
        report: Its report, with paths relative to the family's folder; None if it could not be read.
        left: The report without what somebody has decided to set aside.
        examined: The member's own report and numbers.
        error: Why it could not be read.
    """

    member: Member
    report: Report | None = None
    left: Report | None = None
    examined: Examined | None = None
    error: CheckpointError | None = None

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of its matrices."""
        tensors = self.examined.summary.tensors if self.examined is not None else ()
        return {t.shape for t in tensors if t.role == "weight" and len(t.shape) > 1}

    @property
    def sick(self) -> bool:
        """Are its weights, buffers, moments or scaler sick?"""
        return _is_sick(self.report)

    @property
    def counts(self) -> bool:
        """Are they sick in a way that has not been set aside?"""
        return _is_sick(self.left)

    @property
    def collapsed(self) -> bool:
        """Has its loss scale collapsed, and has that not been set aside? Training from there on is no way out."""
        return self.left is not None and any(f.code == COLLAPSED.code for f in self.left.findings)

    @property
    def well_scaled(self) -> bool:
        """Does it hold a loss scale, and none below 1? A bare model tells nothing of it."""
        scalers = self.examined.summary.scalers if self.examined is not None else ()
        return bool(scalers) and all(scaler.scale >= 1 for scaler in scalers)

    @property
    def step(self) -> int | None:
        """The step stored inside, or else the number in the name."""
        stored = self.examined.summary.global_step if self.examined is not None else None
        return stored if stored is not None else self.member.step


def _is_sick(report: Report | None) -> bool:
    return report is not None and any(
        f.severity == "error" and (f.where.op or "").startswith(_STATE) for f in report.findings
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The members of a family that were read.

    Attributes:
        in_order: Members whose place in the training is known, in its order.
        beside: Members of unknown time.
        left_out: The other members of unknown time, and why they do not count.
    """

    in_order: tuple[Seen, ...]
    beside: tuple[Seen, ...]
    left_out: tuple[Skipped, ...]

    @property
    def all(self) -> tuple[Seen, ...]:
        """Every member that was read."""
        return (*self.in_order, *self.beside)


class _Reader:
    """Reads members, each at most once."""

    def __init__(self, family: Sequence[Member], see: Callable[[Member], Seen]) -> None:
        self.family = family
        self.seen: dict[int, Seen] = {}
        self._see = see

    def __call__(self, index: int) -> Seen:
        if index not in self.seen:
            self.seen[index] = self._see(self.family[index])
        return self.seen[index]

    def in_order(self) -> tuple[Seen, ...]:
        """Returns the members that were read, in the order of the training."""
        return tuple(self.seen[index] for index in sorted(self.seen))


def read_family(
    family: Sequence[Member], look: Look, *, every_member: bool = False, set_aside: SetAside = keep_all
) -> Read:
    """Read as many members as needed; one that cannot be read is passed over, and its error is kept.

    Args:
        family: The members, in order.
        look: Examines one of them.
        every_member: Read all of them.
        set_aside: The search is for the first sick member, and for the first sickness that this does not set aside.
    """

    def see(member: Member, looking: Look = look) -> Seen:
        return _see(member, looking, set_aside)

    reader = _Reader([member for member in family if member.placed], see)
    unplaced = [member for member in family if not member.placed]
    if every_member:
        in_order = tuple(reader(index) for index in range(len(reader.family)))
        return Read(in_order=in_order, beside=tuple(map(see, unplaced)), left_out=())
    _search(reader)
    return _with_undated(reader.in_order(), unplaced, look, see)


def _with_undated(
    in_order: tuple[Seen, ...], unplaced: Sequence[Member], look: Look, see: Callable[[Member, Look], Seen]
) -> Read:
    """Read members of unknown time, as far as they are checkpoints: a run's folder holds other things, too.

    A checkpoint in a folder of its own is read whatever it holds.
    """
    known = {shape for seen in in_order for shape in seen.shapes}
    examined: list[Seen] = []
    skipped: list[Skipped] = []

    def akin(checkpoint: Checkpoint, name: str) -> Examined:
        if known and known.isdisjoint(ref.shape for ref in checkpoint):
            raise CheckpointError("it holds no matrix of the checkpoints' shapes")
        return look(checkpoint, name)

    in_turn = sorted((m for m in unplaced if not m.beside), key=lambda m: not m.alias)
    for member in in_turn[:MAX_UNDATED]:
        seen = see(member, akin)
        if seen.error is None or member.alias:
            examined.append(seen)
        else:
            skipped.append(Skipped(what=member.name, reason=f"not read as a checkpoint: {seen.error}"))
    examined += [see(member, look) for member in unplaced if member.beside]
    rest = in_turn[MAX_UNDATED:]
    skipped += [Skipped(what=m.name, reason="nothing tells when it was saved; --all reads it") for m in rest]
    return Read(in_order=in_order, beside=tuple(examined), left_out=tuple(skipped))


def _search(reader: _Reader) -> None:
    """Read enough to find the first sick member, or else to see a trend.

    If some sickness is set aside, there are two: the first sick member, and the first with more than that. Statements
    about checkpoints that were not read follow from both.
    """
    count = len(reader.family)
    last = next((i for i in reversed(range(count)) if reader(i).report is not None), None)
    if last is None:
        return
    if not reader(last).counts:
        own = [i for i in range(last + 1) if not (reader.family[i].final or reader.family[i].alias)]
        newest = own[-1] if own else last  # `last.pt` stands in for it, and may be intact if it is not
        for index in _spread(newest + 1, _budget(last + 1) - (newest < last)):
            reader(index)
    for sick in (_counts, _sick, _collapsed):
        _find_first(reader, sick)


def _counts(seen: Seen) -> bool:
    return seen.counts


def _sick(seen: Seen) -> bool:
    return seen.sick


def _collapsed(seen: Seen) -> bool:
    return seen.collapsed


def _find_first(reader: _Reader, sick: Callable[[Seen], bool]) -> None:
    """Read until the first sick member that was read and the healthy one before it are neighbours."""
    known = [i for i, seen in reader.seen.items() if sick(seen)]
    if not known:
        return
    top = min(known)
    low = max((i for i, seen in reader.seen.items() if i < top and seen.report is not None), default=-1)
    positions = range(low + 1, top + 1)

    def bad(at: int) -> bool:
        """Is a position sick? A position that cannot be read counts like the next that can."""
        return next((sick(seen) for i in positions[at:] if (seen := reader(i)).report is not None), True)

    found = first_bad([(1 << at) - 1 for at in range(len(positions))], bad)
    first = positions[found.suspects[0]]
    for index in range(first - 1, low, -1):
        if reader(index).report is not None:
            break


def _budget(count: int) -> int:
    """Returns how many members of a healthy training are read: as many as a search could take, and one more."""
    return math.ceil(math.log2(count)) + 2


def _spread(count: int, wanted: int) -> list[int]:
    """Returns the first, the last and evenly spread positions."""
    wanted = min(count, wanted)
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _see(member: Member, look: Look, set_aside: SetAside) -> Seen:
    try:
        with member.open() as checkpoint:
            examined = look(checkpoint, member.name)
    except CheckpointError as error:
        return Seen(member, error=error)
    except UsageError:  # about the command, not about one member
        raise
    except Exception as error:  # noqa: BLE001 - a mistake of ours over one member must not stop the others
        kind = type(error).__name__
        said = f"{member.name} was not examined: {kind} inside ampdoctor; scan it by itself to see where."
        return Seen(member, error=CheckpointError(said))
    report = placed_in_folder(examined.report, member)
    return Seen(member, report, set_aside(report), examined)


def placed_in_folder(report: Report, member: Member) -> Report:
    """Returns the report with paths relative to the family's folder."""

    def path(file: str | None) -> str | None:
        return f"{member.inside}/{file}" if file and member.inside else file

    return replace(
        report,
        findings=tuple(with_files(finding, path) for finding in report.findings),
        skipped=tuple(replace(s, what=path(s.what) or "") for s in report.skipped),
        errors=tuple(replace(e, what=path(e.what) or "") for e in report.errors),
        tensors=report.tensors.inside(member.inside) if isinstance(report.tensors, TensorRows) else report.tensors,
    )
