"""`--checkpoints DIR`: keeps what a training saves by hard links, scans it, and calls it good after N clean steps.

A checkpoint is pinned under `HEALTH/good` as soon as it appears, so that the training's own rotation cannot delete it.
A scan in a process of its own says whether it is finite. It is good after enough clean steps, and `HEALTH/last_good`
is a link to the newest good one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic, time_ns  # bound here, because a script may patch them
from typing import IO, Any

from ampdoctor.checkpoints.folder import may_hold_tensors, says_checkpoint
from ampdoctor.checkpoints.series import alias_of, moment_of
from ampdoctor.evidence.log_records import AlertLine, CheckpointLine, Line, LogRecord, LookLine, StepLine
from ampdoctor.evidence.paths import LAST_GOOD
from ampdoctor.evidence.report_health import Health
from ampdoctor.package import beside

KEPT = "good"
"""The folder of the pinned checkpoints, in that of the log."""
_SETTLED_S = 2.0
"""A checkpoint that has not changed for so long is finished."""
_EVERY_S = 0.5
"""Between two looks at the folder while nothing was added to it."""
_MOST_GOOD = 2
_MOST_WAITING = 8
"""Checkpoints that wait for their scan; with more, they are saved faster than they can be read, and the oldest go."""
_MOST_NEWS = 1000
"""Lines that are remembered until the next look, which tells when a checkpoint was saved between them."""
_DEEPEST = 4
_OVER_TIME = "AMP7"
"""Findings with these codes do not count: a scan also judges the log that a framework saves with a checkpoint, and
an old NaN there says nothing of the weights."""
_NICE = ("nice", "-n", "19")

_Stamp = tuple[int, int, int]  # inode, bytes, time of the last change in ns
_Files = dict[str, _Stamp]  # by path from the folder that holds the checkpoint


@dataclass(slots=True, kw_only=True)
class _Found:
    """A checkpoint as it lies in the training's folder now."""

    name: str  # from the training's folder; of several files, the first
    files: _Files
    numbered: bool  # nothing writes over a name with a number: links hold what was there

    @property
    def changed_ms(self) -> int:
        """When its files last changed, in ms since 1970."""
        return max((changed // 1_000_000 for _, _, changed in self.files.values()), default=0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Saved:
    """One state of a checkpoint: first in the training's folder, then pinned."""

    name: str
    files: _Files
    linked: bool  # or copied
    saved_ms: int  # when, in ms since 1970
    since: float  # when it was last seen to change, by `monotonic`
    step: int = 0  # attempted steps until then
    clean_before: int = 0  # clean ones
    place: Path | None = None  # under `good`; first a folder with a dot, for what has not settled
    pinned: bool = False
    health: Health = "unknown"
    failed: str | None = None  # what came before its clean steps were complete

    @property
    def bytes(self) -> int:
        return sum(size for _, size, _ in self.files.values())


@dataclass(frozen=True, slots=True)
class _News:
    """A line of the log: when it came, attempted and clean steps with it, and what was sick."""

    time_ms: int
    steps: int
    clean: int
    why: str | None


@dataclass(slots=True)
class _Scan:
    of: _Saved
    process: subprocess.Popen[bytes]
    output: IO[bytes] = field(repr=False)


class CheckpointKeeper:
    """Listens to a run's log on a thread of its own, and looks at the folder whenever no line waits.

    Args:
        folder: What the training saves to; it need not exist yet.
        health: Folder of the log.
        write: Takes a line of the log.
        say: Takes a sentence for the user.
        probation: Accepted steps without a sick one or an error alert after which a finite checkpoint is good.
        most_bytes: Bytes of all copies; links take none.
    """

    def __init__(
        self,
        folder: Path,
        health: Path,
        write: Callable[[Line], None],
        say: Callable[[str], None],
        *,
        probation: int,
        most_bytes: int,
    ) -> None:
        self.good: str | None = None  # the name of the newest good one
        self._folder, self._health, self._kept = folder, health, health / KEPT
        self._write, self._say, self._probation, self._most_bytes = write, say, probation, most_bytes
        self._step = self._clean = self._parts = 0
        self._seen: dict[str, _Saved] | None = None  # by key; None before the first look
        self._pins: list[_Saved] = []  # the oldest first
        self._newest: _Saved | None = None  # that was pinned
        self._refused: str | None = None  # why a checkpoint could not be copied
        self._sick = False  # the last that was scanned
        self._scan: _Scan | None = None
        self._news: deque[_News] = deque(maxlen=_MOST_NEWS)
        self._looked, self._changed = 0.0, -1
        self._began_ms = time_ns() // 1_000_000  # what was saved before is of an earlier run
        self._before_ms = self._looked_ms = 0  # times of the last two looks, in ms since 1970
        self._ending, self._ended = Event(), Event()

    # -- what the run does --

    def add(self, record: LogRecord) -> None:
        """Count the clean steps, and note the sick ones."""
        line = record.line
        why = None
        if isinstance(line, StepLine) and line.optimizer == 0:
            self._step = line.step + 1
            if not line.skipped:
                if all(number is None or math.isfinite(number) for number in (line.loss, line.gradient_norm)):
                    self._clean += 1
                else:
                    why = f"step {line.step} was not finite"
        elif isinstance(line, LookLine) and line.verdict == "sick":
            why = f"step {line.step} was sick"
        elif isinstance(line, AlertLine) and line.finding.severity == "error":
            why = f"an alert ({line.finding.code}) came at step {line.step}"
        else:
            return
        news = _News(record.stamp.time_ms, self._step, self._clean, why)
        self._news.append(news)
        for one in {id(one): one for one in (*(self._seen or {}).values(), *self._pins)}.values():
            self._count(one, news)

    def idle(self) -> None:
        """Look at the folder where something may have changed, at the running scan, and at who has become good."""
        ending = self._ending.is_set()
        if ending or self._is_due():
            self._look(ending=ending)
        self._read_scan()
        self._settle()
        if self._scan is None and not self._begin_scan(ending=ending) and ending:
            for one in [one for one in self._pins if one.health == "unknown"]:
                self._drop(one, "unknown", self._not_kept(one) if one.failed else "not kept: the training has ended")
            self._ended.set()

    def finish(self, timeout: float) -> None:
        """Wait, at the end of the training, for the scans that can still make a checkpoint good; `timeout` in s."""
        self._ending.set()
        if not self._ended.wait(timeout) and timeout:
            self._say(f"a checkpoint could not be scanned within {timeout:g} s; it is in {self._kept}")

    def result(self) -> str:
        """Returns why there is no good checkpoint, as the end of a sentence."""
        if self._newest is None:
            return f"no checkpoint was kept: {self._refused or f'none appeared in {self._folder}'}"
        return f"no checkpoint is good: one takes {self._probation} clean steps after it"

    def close(self) -> None:
        """End the running scan."""
        self._ended.set()
        if self._scan is not None:
            with suppress(OSError):
                self._scan.process.kill()
                self._scan.process.wait()
            self._scan.output.close()
            self._scan = None

    def _count(self, one: _Saved, news: _News) -> None:
        """Count a line for a checkpoint: lines come late, and some are of steps before it was saved."""
        if news.time_ms <= one.saved_ms:
            one.step, one.clean_before = news.steps, news.clean
        elif news.why is not None and one.health != "good" and news.clean - one.clean_before < self._probation:
            one.failed = one.failed or news.why

    def _has_passed(self, one: _Saved) -> bool:
        return one.failed is None and self._clean - one.clean_before >= self._probation

    # -- what lies in the folder --

    def _is_due(self) -> bool:
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            changed = -1
        due = changed != self._changed or monotonic() - self._looked >= _EVERY_S
        self._changed = changed
        return due

    def _look(self, *, ending: bool) -> None:
        self._looked = now = monotonic()
        self._before_ms, self._looked_ms = self._looked_ms, time_ns() // 1_000_000
        left_out = {_place_of(self._health), _place_of(self._kept)}
        there = dict(_below(self._folder, "", left_out))
        if self._seen is None:
            self._adopt()
            earlier = {key: found for key, found in there.items() if found.changed_ms < self._began_ms}
            self._seen = {key: self._state(found, now, pinned=True) for key, found in earlier.items()}
        for key, found in there.items():
            seen = self._seen.get(key)
            if seen is None or not found.files.items() <= seen.files.items():
                self._spoil(found.files)
                part = None if seen is None or seen.pinned else seen.place
                seen = self._seen[key] = self._state(found, now, part=part)
                self._link(seen)
            elif seen.pinned:
                continue
            elif found.files != seen.files:  # it is being deleted, or a file of its making is
                seen.files, seen.since = found.files, now
            elif ending or now - seen.since >= _SETTLED_S:
                self._pin(seen, exact=True)
        for key in [key for key in self._seen if key not in there]:
            gone = self._seen.pop(key)
            if not gone.pinned and gone.place is not None:  # rotated away at once: the scan says whether it is whole
                self._pin(gone)

    def _state(self, found: _Found, now: float, *, part: Path | None = None, pinned: bool = False) -> _Saved:
        """Return the state that was saved since the last look: its files say when, lines which step that was."""
        saved = min(max(found.changed_ms, self._before_ms), self._looked_ms)  # another clock may say anything
        one = _Saved(
            name=found.name,
            files=found.files,
            linked=found.numbered,
            saved_ms=saved,
            since=now,
            place=part,
            pinned=pinned,
        )
        for news in self._news:
            self._count(one, news)
        return one

    def _adopt(self) -> None:
        """Go on from what an earlier process of this run has kept: its last good one stays, others are judged anew."""
        with suppress(OSError):
            for name in os.listdir(self._kept):  # noqa: PTH208 - names are all that is wanted
                if name.startswith("."):
                    _remove(self._kept / name)
        link = self._health / LAST_GOOD
        target = str(link.readlink()) if link.is_symlink() else ""
        with suppress(OSError):
            for entry in sorted(os.scandir(self._kept), key=lambda one: one.stat().st_mtime):
                found = _Found(name=entry.name, files=dict(_stamps(Path(entry.path))), numbered=True)
                one = self._state(found, 0.0, part=Path(entry.path), pinned=True)
                if target == f"{KEPT}/{entry.name}":
                    one.health, self.good = "good", entry.name
                self._pins.append(one)

    # -- pins --

    def _link(self, one: _Saved) -> None:
        """Link all files of a checkpoint at once; what is written to them later is in the link as well."""
        if not one.linked:
            return
        if one.place is None:
            self._parts += 1
            one.place = self._kept / f".{os.getpid()}-{self._parts}"
        try:
            for file, (inode, _, _) in one.files.items():
                target = one.place / file
                if target.exists():
                    if target.stat().st_ino == inode:
                        continue
                    target.unlink()
                target.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # rotated away in this moment
                    os.link(self._home(one) / file, target, follow_symlinks=False)
        except OSError:  # another file system, one without links, or one that is full
            _remove(one.place)
            one.place, one.linked = None, False

    def _pin(self, one: _Saved, *, exact: bool = False) -> None:
        """Give a checkpoint its place; with `exact` only the files that it has now, else all that it ever had."""
        if not one.linked and not self._copy(one):
            return
        one.pinned = True
        if one.place is None or not one.place.exists():
            return
        for path in one.place.rglob("*") if exact else ():
            if path.is_file() and str(path.relative_to(one.place)) not in one.files:
                path.unlink()
        inside = os.listdir(one.place)  # noqa: PTH208 - names are all that is wanted
        name, count = Path(one.name).name, 1
        if not one.linked:
            name = _with(name, f"-step-{one.step}")
        while (place := self._kept / (name if count == 1 else _with(name, f"-{count}"))).exists():
            count += 1
        if len(inside) == 1:
            (one.place / inside[0]).rename(place)
            _remove(one.place)
        else:
            one.place.rename(place)
        _synced(self._kept)
        one.place = place
        self._pins.append(one)
        self._newest = one

    def _copy(self, one: _Saved) -> bool:
        """Copy a checkpoint whose name may be written over; False where it has changed meanwhile."""
        held = sum(pin.bytes for pin in self._pins if not pin.linked)
        if held + one.bytes > self._most_bytes:
            return self._refuse(one, f"a copy of {one.bytes:,} bytes would go beyond --good-max")
        self._parts += 1
        place = self._kept / f".{os.getpid()}-{self._parts}"
        try:
            for file in one.files:
                target = place / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._home(one) / file, target)
                with target.open("rb") as copy:
                    os.fsync(copy.fileno())
            whole = all(_stamp_of(self._home(one) / file) == stamp for file, stamp in one.files.items())
        except FileNotFoundError:
            whole = False
        except OSError as error:
            _remove(place)
            return self._refuse(one, (error.strerror or str(error)).lower())
        if not whole:
            _remove(place)
            return False
        one.place = place
        return True

    def _refuse(self, one: _Saved, why: str) -> bool:
        one.pinned = True
        self._tell(one, "unknown", f"not kept: {why}")
        if self._refused is None:
            self._say(f"checkpoint {one.name} is not kept: {why}")
        self._refused = why
        return False

    def _home(self, one: _Saved) -> Path:
        return (self._folder / one.name).parent

    def _spoil(self, files: _Files) -> None:
        """Let go of links whose file is being written over in place."""
        stamps = {stamp[0]: stamp for stamp in files.values()}
        for one in list(self._pins):
            if one.linked and any(stamps.get(stamp[0], stamp) != stamp for stamp in one.files.values()):
                self._drop(one, "unknown", "its file was written over")

    def _drop(self, one: _Saved, health: Health, reason: str) -> None:
        self._pins.remove(one)
        if one.place is not None:
            gone = one.place.with_name(f".{one.place.name}.gone")
            with suppress(OSError):
                one.place.rename(gone)
                _remove(gone)
        if one.name == self.good and one.health == "good" and health != "good":
            self._point_to(max((pin for pin in self._pins if pin.health == "good"), key=_step, default=None))
        self._tell(one, health, reason)

    def _tell(self, one: _Saved, health: Health, reason: str) -> None:
        one.health = health
        path = self._folder / one.name
        self._write(CheckpointLine(step=one.step, path=str(path), health=health, reason=reason, size_bytes=one.bytes))

    # -- scans --

    def _begin_scan(self, *, ending: bool) -> bool:
        """Scan the newest checkpoint that can be good at once, else the newest; returns whether a scan was begun.

        At the end of a training these are the newest that can be good, and the one that was saved last.
        """
        waiting = [one for one in self._pins if one.health == "unknown"]
        passed = [one for one in waiting if self._has_passed(one)]
        rest = [one for one in waiting if one not in passed]
        for one in (*passed[:-_MOST_GOOD], *rest[:-_MOST_WAITING]):  # those that may be good soonest stay
            self._drop(one, "unknown", "not scanned: checkpoints are saved faster than they are read")
        newest_good = max((one.step for one in self._pins if one.health == "good"), default=-1)
        passed = [one for one in passed[-_MOST_GOOD:] if one.step > newest_good or not ending]
        chosen = passed or [one for one in rest[-_MOST_WAITING:] if not ending or one is self._newest]
        if not chosen or chosen[-1].place is None:
            return False
        # the options that the user's environment sets are the watch's: --output would be written over
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AMPDOCTOR_")}
        nice = _NICE if shutil.which(_NICE[0]) else ()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the scan has been read
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*nice, *beside("ampdoctor.__main__", "scan", str(chosen[-1].place), "--format", "json", "--isolated")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # a Ctrl-C is the training's
        )
        self._scan = _Scan(chosen[-1], process, output)
        return True

    def _read_scan(self) -> None:
        scan = self._scan
        if scan is None or scan.process.poll() is None:
            return
        self._scan = None
        with scan.output:
            scan.output.seek(0)
            said = scan.output.read()
        if scan.of not in self._pins:
            return
        health, reason = _result_of(said)
        was_sick, self._sick = self._sick, health == "sick"
        if health == "finite":
            self._tell(scan.of, "probation", f"finite; good after {self._probation} clean steps")
            return
        if not was_sick:
            self._say(f"checkpoint {scan.of.name} is {'sick: ' if self._sick else ''}{reason}")
        self._drop(scan.of, health, reason)

    def _settle(self) -> None:
        """Call good what is finite and has its clean steps; let go of what has failed, and of all but two good ones."""
        for one in list(self._pins):
            if one.failed is not None and one.health == "probation":
                self._drop(one, "finite", self._not_kept(one))
            elif one.health == "probation" and self._has_passed(one) and one.place is not None:
                newest = max((pin.step for pin in self._pins if pin.health == "good"), default=-1)
                self._tell(one, "good", f"finite, and {self._probation} clean steps after it")
                if one.step >= newest:
                    self._point_to(one)
        good = sorted((one for one in self._pins if one.health == "good"), key=_step)
        for one in good[:-_MOST_GOOD]:
            self._drop(one, "good", "replaced by newer ones")

    def _not_kept(self, one: _Saved) -> str:
        return f"not kept: {one.failed}, before {self._probation} clean steps"

    def _point_to(self, one: _Saved | None) -> None:
        """Move the link in one step: whoever follows it finds the old checkpoint or the new one."""
        self.good = None if one is None else one.name
        beside = self._health / f".{LAST_GOOD}-{os.getpid()}"
        beside.unlink(missing_ok=True)
        if one is None or one.place is None:
            (self._health / LAST_GOOD).unlink(missing_ok=True)
            return
        beside.symlink_to(f"{KEPT}/{one.place.name}")
        beside.replace(self._health / LAST_GOOD)
        _synced(self._health)


def _step(one: _Saved) -> int:
    return one.step


def _place_of(folder: Path) -> tuple[int, int]:
    """Returns what a folder is, whatever its path; (0, 0) if it is not there."""
    with suppress(OSError):
        seen = folder.stat()
        return seen.st_dev, seen.st_ino
    return 0, 0


def _below(
    root: Path, inside: str, left_out: AbstractSet[tuple[int, int]], depth: int = 0
) -> Iterator[tuple[str, _Found]]:
    """Yields a folder's checkpoints: folders with a number or a word in the name, and files that belong together."""
    by_key: dict[str, _Found] = {}
    try:
        entries = sorted(os.scandir(root / inside), key=lambda one: one.name)
    except OSError:
        return
    for entry in entries:
        path, name = Path(entry.path), str(Path(inside, entry.name))
        folder = entry.is_dir(follow_symlinks=False)
        if entry.name.startswith(".") or entry.is_symlink() or (folder and _place_of(path) in left_out):
            continue
        moment, alias = moment_of(entry.name, folder=folder), alias_of(entry.name, folder=folder)
        if folder and moment is None and alias is None:
            if depth < _DEEPEST:
                yield from _below(root, name, left_out, depth + 1)
        elif folder:
            files = dict(_stamps(path))
            if any(says_checkpoint(Path(file).name) for file in files):
                yield name, _Found(name=name, files=files, numbered=moment is not None)
        elif may_hold_tensors(entry.name):
            when = None if moment is None else f"{moment.unit} {moment.epoch} {moment.number} {moment.version}"
            key = f"{inside}{os.sep}{when or (entry.name if alias else '')}"
            found = by_key.setdefault(key, _Found(name=name, files={}, numbered=when is not None))
            found.files.update(_stamps(path))
    yield from ((key, found) for key, found in by_key.items() if found.files)


def _stamps(top: Path) -> Iterator[tuple[str, _Stamp]]:
    """Yields the files of a file or folder, by their path from the folder that it lies in."""
    for folder, _, names in os.walk(top) if top.is_dir() else ((top.parent, (), (top.name,)),):
        for name in names:
            path = Path(folder, name)
            with suppress(OSError):
                if not path.is_symlink():
                    yield str(path.relative_to(top.parent)), _stamp_of(path)


def _stamp_of(path: Path) -> _Stamp:
    seen = path.stat()
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


def _with(name: str, text: str) -> str:
    """Returns a file's or folder's name with a text before its suffix: `last-step-3900.pt`."""
    path = Path(name)
    return f"{path.stem}{text}{path.suffix}"


def _result_of(said: bytes) -> tuple[Health, str]:
    """Returns what a scan's report says of a checkpoint, and why."""
    try:
        report: Any = json.loads(said)
        errors = [one for one in report["findings"] if one["severity"] == "error"]
        unread = [one["message"] for one in report["errors"]]
        verdict = report["verdict"]
    except (ValueError, KeyError, TypeError):
        return "unknown", "not kept: its scan has failed"
    sick = [one["message"] for one in errors if not one["code"].startswith(_OVER_TIME)]
    if sick:
        return "sick", sick[0]
    if verdict in ("healthy", "sick") and not unread:
        return "finite", ""
    return "unknown", f"not kept: {unread[0]}" if unread else "not kept: its scan was inconclusive"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _synced(folder: Path) -> None:
    """Write a folder's entries to the disk; a system that cannot is left as it is."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
