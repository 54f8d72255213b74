"""Places, numbers and outcomes of a report in words."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.diagnosis.catalogue import effects
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.paths import checkpoint_path, file_within, path_in_repository, posix, scanned_path
from ampdoctor.evidence.report import SEVERITIES, Finding, FixedEntry, Prescription, PrescriptionStatus, Report, Verdict
from ampdoctor.evidence.thresholds import MovedThreshold

_MOVED_FIRST = {
    "data": "the data",
    "loss": "the loss",
    "both": "the loss and the gradient norm, together",
    "forward": "the forward",
    "gradient": "the gradients",
    "optimizer": "the optimizer's settings",
    "scale": "the loss scale",
    "logits": "the logits",
    "weights": "the weights",
    "hardware": "the time or the memory of a step",
}
"""Words for `first` in the evidence of the rules on runs over time."""
_PROOF: Mapping[PrescriptionStatus, str] = {
    "verified": (
        "verified by replay: from the same state the failure comes back without the change; "
        "with it the steps are finite and agree with fp32"
    ),
    "failed": "tried by replay: it does not cure",
    "worse": "tried by replay: the change makes it worse",
    "intervention": "tried as an intervention at the place of origin: the code itself is yours to change",
    "not_run": "not replayed",
}

PROVED: Mapping[PrescriptionStatus, str] = {
    "verified": "verified by replay",
    "failed": "a replay with it fails",
    "worse": "a replay with it is worse",
    "intervention": "shown by an intervention; the code is yours to change",
    "not_run": "not replayed",
}
"""The same in a few words."""
VERDICTS: Mapping[Verdict, str] = {
    "sick": "sick",
    "healthy": "healthy",
    "not_reproduced": "not reproduced: the failure did not come back in the steps that were replayed",
    "inconclusive": "inconclusive: what was examined does not settle it",
    "not_judged": "not judged: the content is listed, not examined",
}

_LEFT_OUT = "not judged: everything that was named is left out"  # replaces the verdict's words if nothing was listed
_NOTHING_SEEN = "nothing sick was seen"  # replaces the verdict's words where a training was watched
_FEW_STEPS = re.compile(r"needs (\d+) steps, has (\d+)")
_TRAINING = ("loss", "gradient norm")  # without these checks, a log does not show how well the training goes
ABOUT_GRADIENTS = "(dA: of activations, dW: of weights)"
_TOO_FEW = "not judged: too few steps to say what is usual"  # replaces the verdict's words where a log is short
_PLANNED = ("no plan", "a plan that is exact and fits")  # replace the verdict's words for a batch plan
_FOUND_NOT_MADE = ("checkpoint", "data")  # phases that find a value which something earlier has produced
_SMALL = 2.0**-10  # smaller powers of two are shown as such: 2^-56 rather than 1.3877787807814457e-17
_WHOLE = 1e15  # smaller whole numbers are shown in all their digits
_LARGE = 2.0**17  # larger loss scales are shown as powers of two


def verdict(report: Report) -> str:
    """Return the verdict in one line: `outcome`, `counts`, and whether anything could not be examined."""
    partly = "" if report.complete else f"; incomplete: {count(len(report.errors), 'part')} could not be examined"
    return f"{outcome(report)}{counts(report)}{partly}"


def of_verdict(report: Report) -> str:
    """Return the verdict without numbers."""
    if report.verdict == "not_judged" and report.command == "run":
        return _NOTHING_SEEN
    if report.verdict == "not_judged" and report.command == "health":
        return _TOO_FEW
    if report.plan is not None:
        return _PLANNED[report.verdict == "healthy"]
    left_out = report.verdict == "not_judged" and report.structure is None
    return _LEFT_OUT if left_out else VERDICTS[report.verdict]


def outcome(report: Report) -> str:
    """Return the verdict alone; if healthy, with the replayed steps, and with what was not judged."""
    if report.verdict != "healthy":
        return of_verdict(report)
    steps = report.run.get("steps")
    what = "recorded step" if report.run.get("replays") == 0 else "replayed step"  # a profile or a log: nothing ran
    seen = f" in {count(steps, what)}" if isinstance(steps, int) else ""
    left = ", not compared with fp32" if report.is_not_compared else ""
    if report.command == "scan" and any("runs_code" in finding.evidence for finding in report.found):
        left = " in its numbers; loading it elsewhere would run code"
    return f"{of_verdict(report)}{seen}{_alone(report)}{left}"


def _alone(report: Report) -> str:
    """Return what was not judged of the loss and norm of logs: by name for one log, as a count for several."""
    if report.command != "health":
        return ""
    logs: dict[str, dict[str, str]] = {}
    for check in report.checks:
        log, _, name = check.name.rpartition(": ")
        logs.setdefault(log, {})[name] = check.result
    bare = [checks for checks in logs.values() if not any(_is_there(checks.get(name, "")) for name in _TRAINING)]
    short = [few for checks in logs.values() if (few := _too_few(checks))]
    if len(logs) > 1:
        none = f"; {len(bare)} of {len(logs)} logs without a loss or a gradient norm, which were not judged there"
        few = f"; {len(short)} of {len(logs)} logs with too few steps for all rules"
        return f"{none if bare else ''}{few if short else ''}"
    if not bare:
        return f" in what was judged: {short[0]}" if short else ""
    judged = "the loss scale" if _is_there(bare[0].get("loss scale", "")) else "the steps"
    return f" as to {judged} alone: no loss and no gradient norm was judged"


def _too_few(checks: Mapping[str, str]) -> str:
    """Return how many steps the rules on the loss and the norm need and have; "" where there are enough."""
    found = {name: _FEW_STEPS.fullmatch(checks.get(name, "")) for name in _TRAINING}
    names: dict[tuple[str, str], list[str]] = {}
    for name, few in found.items():
        if few is not None:
            names.setdefault((few[1], few[2]), []).append(f"the {name}")
    return ", ".join(
        f"{' and '.join(those)} {'need' if len(those) > 1 else 'needs'} {least} steps and "
        f"{'have' if len(those) > 1 else 'has'} {known}"
        for (least, known), those in names.items()
    )


def _is_there(result: str) -> bool:
    return bool(result) and result != "not in the log" and not result.startswith("not judged: none")


def counts(report: Report) -> str:
    """Return the number of findings of each severity, of their effects and of suppressed ones, after the outcome."""
    behind = effects(report.findings) if report.health is not None else {}
    causes = [finding.severity for at, finding in enumerate(report.findings) if at not in behind]
    numbers = [*((causes.count(severity), severity) for severity in SEVERITIES), (len(behind), "effect")]
    found = ", ".join(count(number, what) for number, what in numbers if number)
    set_aside = f"; {count(len(report.suppressed), 'finding')} suppressed" if report.suppressed else ""
    return f"{f' ({found})' if found else ''}{set_aside}"


def target(named: Mapping[str, Any]) -> str:
    """Return the subject of a report in a line: the checkpoint, the factory, or the saved profile."""
    about = named.get("location") or named.get("path") or named.get("profile") or named.get("factory") or ""
    checkpoint = named.get("checkpoint")
    return f"{about} with {checkpoint}" if checkpoint else str(about)


def moved(thresholds: Sequence[MovedThreshold]) -> str:
    """Return the thresholds that the user has changed, in a line."""
    said = (f"{t.code}.{t.name} = {value(t.value)} (default {value(t.default)})" for t in thresholds)
    return f"thresholds moved: {', '.join(said)}"


def place(where: Where) -> str:
    """Return an address in one line: when, which part, which module and op, which line of the user's code."""
    phase = f"{where.phase} (recomputed in the backward)" if where.recompute else where.phase
    return "; ".join(part for part in (_when(where), phase, _what(where), _lines(where)) if part)


def _when(where: Where) -> str:
    parts = []
    if where.step is not None:
        parts.append(f"step {where.step}")
        if where.micro_batch:
            parts.append(f"micro-batch {where.micro_batch}")
    if where.global_step is not None:
        parts.append(f"global step {where.global_step}")
    if where.rank:
        parts.append(f"rank {where.rank}")
    return ", ".join(parts)


def _what(where: Where) -> str:
    parts = []
    if where.module:
        parts.append(f"module {where.module}" + (f" (call {where.call})" if where.call else ""))
    elif where.phase in {"forward", "backward"} and where.tensor is None and where.file is None:  # a log has no code
        either = where.phase == "backward" and where.op  # an op's forward may have been the loop's
        parts.append("the root module's own code" + (" or the loop's" if either else ""))
    if where.op:
        parts.append(where.op)
    if where.tensor:
        parts.append(f"tensor {where.tensor}")
    if where.file:
        parts.append(f"file {where.file}")
    if where.nonfinite != "none":
        kind = {"nan": "NaN", "inf": "Inf"}[where.nonfinite]
        of_a_checkpoint = where.file is not None and where.source is None  # it has no code; a run's log has
        met = where.phase in _FOUND_NOT_MADE or of_a_checkpoint
        parts.append(f"{kind} is there" if met else f"first {kind} here")
    return ", ".join(parts)


def _lines(where: Where) -> str:
    known = (("", where.source), ("made by ", where.forward_source))
    return ", ".join(f"{how}{source.file}:{source.line}" for how, source in known if source is not None)


def change(prescription: Prescription) -> str:
    """Return what to change, in one line: the sentence, and the exact value where the sentence lacks it."""
    named = prescription.value
    if prescription.kind == "fp32_modules" and isinstance(named, list | tuple):
        named = [name or "the whole model" for name in named]  # the root module's name is empty
    exact = f"{prescription.kind} = {setting(named)}"
    if not prescription.detail:
        return exact
    return prescription.detail if prescription.kind == "code" else f"{prescription.detail} ({exact})"


def proof(prescription: Prescription) -> str:
    """Return the result of replaying the change, in one line."""
    sentence = _PROOF[prescription.status]
    return f"{sentence} ({prescription.reason})" if prescription.reason else sentence


def told(finding: Finding) -> dict[str, str]:
    """Return where, why, change, proof and help of a finding, a line each; only what is known."""
    lines = {"where": place(finding.where), "why": (finding.cause or "").replace("_", " ")}
    if finding.prescription is not None:
        lines |= {"change": change(finding.prescription), "proof": proof(finding.prescription)}
    return {label: line for label, line in {**lines, "help": finding.help}.items() if line}


def moved_first(evidence: Mapping[str, Any]) -> str:
    """Return what moved first in a run over time; "" where the evidence does not say it."""
    first = evidence.get("first")
    return _MOVED_FIRST.get(first, "") if isinstance(first, str) else ""


def known(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evidence without None, empty values and what `moved_first` says, sorted by name as in JSON."""
    told = {"first"} if moved_first(evidence) else set()
    said = {key: item for key, item in evidence.items() if item is not None and key not in told}
    return {key: said[key] for key in sorted(said) if not isinstance(said[key], Sized) or said[key]}


def value(item: Any) -> str:
    """Return a value of the evidence as compact text; strings and lists of names without quotes."""
    ready = to_plain(item)
    if isinstance(ready, float) and 0.0 < abs(ready) < _SMALL and abs(math.frexp(ready)[0]) == 0.5:
        return f"{'-' if ready < 0 else ''}2^{math.frexp(ready)[1] - 1}"
    if isinstance(ready, str):
        return ready
    if isinstance(ready, Sequence) and all(isinstance(part, str) for part in ready):
        return ", ".join(ready)
    return json.dumps(ready, sort_keys=True, ensure_ascii=False)


def setting(item: Any) -> str:
    """Return a setting to copy: as `value`, but with all digits of its numbers."""
    if isinstance(item, Mapping):
        return json.dumps(dict(item), sort_keys=True, ensure_ascii=False)
    if isinstance(item, float) and math.isfinite(item):
        return repr(float(item))
    return value(item)


def record(item: Mapping[str, Any]) -> str:
    """Return the known parts of a record: `dtype float16, shape [48, 128]`."""
    return ", ".join(f"{key} {value(part)}" for key, part in known(item).items())


def percent(fraction: Any) -> str:
    """Return a fraction 0..1 as a percentage; a small nonzero one as `<0.01%`."""
    if not isinstance(fraction, int | float):
        return "-"
    if 0 < fraction < 1e-4:
        return "<0.01%"
    return f"{100 * fraction:.2f}%"


def number(item: Any) -> str:
    """Return a number in four significant digits, a whole one in all; `-` for None, and a word as it is."""
    if item is None or isinstance(item, str):
        return item or "-"
    return f"{int(item)}" if float(item).is_integer() and abs(item) < _WHOLE else f"{item:.4g}"


def size(count: float) -> str:
    """Return bytes as `1.21 MB`."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.3g} {units[0]}"


def settings(
    known: Mapping[str, Any] | None, shown: Callable[[Any], str] | None = None, without: Collection[str] = ()
) -> str:
    """Return `key=value, key=value`, or `none`; `shown` gives the text of a value, by default `setting`."""
    given = shown or setting
    return ", ".join(f"{key}={given(item)}" for key, item in known.items() if key not in without) if known else "none"


def count(number: int, noun: str) -> str:
    """Return `1 error`, `2,000 errors`, `3 entries`."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun}" if number == 1 else f"{number:,} {many}"


def short(number: Any) -> str:
    """Return a number for a table in two significant digits: `0.00039`; `-` where there is none."""
    return f"{number:.2g}" if isinstance(number, int | float) else value(number) if number is not None else "-"


def binary(number: Any) -> str:
    """Return a loss scale: `65536`, and very large or small powers of two as `2^24`."""
    if not isinstance(number, int | float) or not math.isfinite(number):
        return "-" if number is None else value(number)
    mantissa, exponent = math.frexp(number)
    if mantissa == 0.5 and not _SMALL < number <= _LARGE:
        return f"2^{exponent - 1}"
    return f"{number:.10g}"


# -- the file of a finding, and its line if known: annotations and code scanning need one --


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file."""

    file: str  # a path with `/`, relative to the working directory if it lies below it
    line: int | None = None  # 1-based; None if unknown


def location_of(finding: Finding, target: Mapping[str, Any]) -> Location:
    """Returns the user's line of a finding, else the checkpoint's file, else the report's subject."""
    source = finding.where.source or finding.where.forward_source
    if source is not None:
        return Location(posix(source.file), source.line)
    file = finding.where.file
    return Location(target_file(target) if file is None else file_within(checkpoint_path(target), posix(file)))


def in_repository(at: Location, target: Mapping[str, Any]) -> Location:
    """Returns the place relative to the repository's root, because GitHub does not know the working directory."""
    return replace(at, file=path_in_repository(at.file, target))


def target_file(target: Mapping[str, Any]) -> str:
    """Returns the file or folder of a report: that of its factory or saved profile, else "."."""
    # For `package.module:function` it is `package/module.py`, where such a module lies in most repositories
    factory = target.get("factory")
    if scanned_path(target):
        return checkpoint_path(target)
    if isinstance(factory, str) and ":" in factory and "profile" not in target:
        module = factory.rpartition(":")[0]
        return posix(module) if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    return posix(target.get("profile") or ".")


# -- fixed entries of the baseline --


def fixed(report: Report) -> Sequence[FixedEntry]:
    """Return the baseline's entries that were not found again."""
    return () if report.baseline is None else report.baseline.fixed


def fixed_line(entry: FixedEntry) -> str:
    """Return the line of a fixed entry."""
    return f"{entry.severity} {entry.code} {place_of(entry)}: {entry.message}"


def place_of(entry: FixedEntry) -> str:
    """Return what tells an entry from others of its code: tensor or module, op, and the file if there are several."""
    name, op, file = entry.tensor or entry.module, entry.op or "", entry.file
    if name and op and not op.startswith("state:"):  # "state:" ops are the tensor itself
        name = f"{name} ({op})"
    return f"{name or op} in {file}" if file else str(name or op)


# -- a curve in one line of text --

_LEVELS = "▁▂▃▄▅▆▇█"
_NONFINITE = "\N{MULTIPLICATION SIGN}"


def sparkline(values: Sequence[float | None], width: int, *, logarithmic: bool = False) -> str:
    """Returns a curve in at most `width` characters, each for the median of one or more values; a space for None.

    A character marks a non-finite value among its values, so an overflow in a thousand good steps is visible. If
    `logarithmic`, levels are equal ratios, and values that are not positive get the lowest level.
    """
    if width < 1 or not values:
        return ""
    columns = min(width, len(values))
    cells = [values[len(values) * at // columns : len(values) * (at + 1) // columns] for at in range(columns)]
    heights = [_height(cell, logarithmic=logarithmic) for cell in cells]
    known = [height for height in heights if height is not None and math.isfinite(height)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    line = []
    for height in heights:
        if height is None:
            line.append(" ")
        elif math.isnan(height):
            line.append(_NONFINITE)
        else:
            share = (height - low) / (high - low) if high > low and math.isfinite(height) else 0.0
            line.append(_LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)])
    return "".join(line)


def _height(cell: Sequence[float | None], *, logarithmic: bool) -> float | None:
    """Return the height of a column: NaN where one of its values is not finite, None where there is none."""
    known = [value for value in cell if value is not None]
    if not known:
        return None
    if not all(map(math.isfinite, known)):
        return math.nan
    value = statistics.median(known)
    if not logarithmic:
        return value
    return math.log2(value) if value > 0.0 else -math.inf


# -- the order of a scaler's settings, which JSON loses by sorting --

SCALER = ("init_scale", "scale", "growth_factor", "backoff_factor", "growth_interval")
"""Settings of a loss scaler, in the order of GradScaler's signature."""


def in_order(values: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """Return the mapping with the keys of `first` in that order, and the others after them, sorted."""
    known = [name for name in first if name in values]
    return {name: values[name] for name in (*known, *sorted(values.keys() - set(known)))}
