"""The outline of a report: what it says, once, in blocks that console, Markdown and HTML draw."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import effects, figure, rules, short
from ampdoctor.evidence.report import Finding, Prescription, Report
from ampdoctor.evidence.report_health import LookMark
from ampdoctor.evidence.report_replay import FINITE_CHECK
from ampdoctor.reports import outline_sections as sections
from ampdoctor.reports import outline_values as values
from ampdoctor.reports import text as words
from ampdoctor.reports.blocks import Block, Code, Fold, Heading, Line, Outline, Pairs, Text, fold, pairs
from ampdoctor.reports.fix_code import Code as NoCode
from ampdoctor.reports.fix_code import code_of, setting_of
from ampdoctor.reports.next_step import bundle_command, next_step

_IN_A_WORD = ("ok", "found", "not_run")
_SHARES = ("flushed", "subnormal", "overflowed")
_ABSENT = ("not in the log", "not in the file")
_IN_FULL = 3  # most fixed entries of a baseline that are shown at once
_WORST = 3  # findings that are named where many have one cause
_DTYPE = "its dtype"  # in a rule's title, for which the finding's own dtype is put


def outline(report: Report) -> Outline:
    """Return what the report says, in the order in which it is read."""
    step = next_step(report)
    said = f"next: {step.said}"
    return Outline(
        head=tuple(_head(report)),
        findings=tuple(_findings(report)),
        sections=tuple(_sections(report)),
        next=Code(title=said, lines=(step.line,), language="console") if step.line else Text(said),
    )


def _sections(report: Report) -> Iterator[Block]:
    yield from _section(
        "not examined", "errors", pairs((e.what, Text(e.message, "error", e.kind)) for e in report.errors)
    )
    yield from sections.health(report)
    yield from sections.plan(report.plan)
    yield from sections.path(report.path)
    yield from sections.proof(report.proof)
    yield from sections.precision(report.precision)
    yield from sections.scaling(report.scaler, kept=report.precision is None or report.precision.precision == "fp16")
    yield from values.ranges(report.profile)
    yield from values.trend(report)
    yield from values.change(report.change)
    yield from values.structure(report)
    yield from _section("checked", "checks", tuple(_checks(report)))
    yield from _section("set aside", "baseline", tuple(_set_aside(report)))
    yield from _section("left out", "skipped", pairs((one.what, one.reason) for one in report.skipped))
    yield from _section("kept", "kept", tuple(_kept(report)))
    if report.tensors:
        found = "" if report.findings else ", nothing found in them"
        title = Text(f"{words.count(len(report.tensors), 'tensor')}{found}")
        yield Heading(text="tensors", level=2, anchor="tensors")
        yield Fold(title=title, open=bool(report.findings), view="tensors")


def _section(title: str, anchor: str, blocks: Sequence[Block]) -> Iterator[Block]:
    if blocks:
        yield Heading(text=title, level=2, anchor=anchor)
        yield from blocks


# -- the head --


def _head(report: Report) -> Iterator[Block]:
    target = _target(report)
    yield Heading(level=1, text=f"ampdoctor {report.command}: {target}" if target else f"ampdoctor {report.command}")
    partly = "" if report.complete else "; incomplete: not all was examined"
    counted = f"{words.counts(report)}{partly}".strip()
    counted = f"({counted[2:]})" if counted.startswith("; ") else counted
    yield Text(counted, report.verdict, f"verdict: {words.outcome(report)}")
    if report.trend is not None:
        yield Text(report.trend.summary)
    if report.plan is not None:
        yield Text(sections.plan_title(report.plan))
    for note in report.run.get("notes") or ():
        yield Text(f"note: {note}", "muted")
    if report.thresholds:
        yield Text(words.moved(report.thresholds), "muted")
    if report.configuration is not None:
        yield Text(f"settings from {words.value(report.configuration.file)}", "muted")
    yield from fold("what was examined, and how", *pairs(_facts(report)))


def _target(report: Report) -> str:
    factory = report.target.get("factory")
    measured = "profile" in report.target  # the files are the target; the factory was measured at another time
    named = [
        words.value(v)
        for key, v in report.target.items()
        if isinstance(v, str) and key != "location" and not (measured and key == "factory")
    ]
    if measured and isinstance(factory, str):
        named[-1] += f" (measured from {words.value(factory)})"
    step = report.target.get("global_step")
    if step is not None and report.trend is None:  # for many checkpoints the trend has the step
        named.append(f"step {step}")
    return ", ".join(named)


def _facts(report: Report) -> Iterator[tuple[str, Line]]:
    for key, item in report.target.items():
        if item is not None and not isinstance(item, Mapping) and key not in ("members", "files"):
            yield key.replace("_", " "), words.value(item)
    for key, item in report.run.items():
        if isinstance(item, str | int | float):
            yield key.replace("_", " "), words.value(item)


# -- findings --


def _findings(report: Report) -> Iterator[Block]:
    """Yield the findings open, the first of each cause; what has the same cause, or came after it, is folded below."""
    looks = kept_looks(report)
    behind = effects(report.findings) if report.health is not None else {}
    groups: dict[object, list[int]] = {}
    for number in range(len(report.findings)):
        groups.setdefault(_cause(report, report.findings[behind.get(number, number)]), []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda number: number in behind)  # a cause comes first, whatever the order of the codes
        made = [finding_fold(report, number, looks.get(number), is_effect=number in behind) for number in numbers]
        yield made[0]
        rest = [report.findings[number] for number in numbers[1:]]
        yield from fold(_others(report.findings[numbers[0]], rest, over_time=report.health is not None), *made[1:])


def _cause(report: Report, finding: Finding) -> object:
    """Return what findings of one cause have in common; in a log an error and all errors behind it are one story."""
    if report.health is not None and finding.severity == "error":
        return finding.where.file
    one_save = "paths" not in report.target and report.target.get("format") != "folder"
    file = "" if one_save and report.health is None else finding.where.file
    return (finding.cause or finding.code, finding.severity, file)


def _others(first: Finding, rest: Sequence[Finding], *, over_time: bool) -> str:
    """Return the three that are worst, or over time the first three, and how many more there are."""
    if over_time:
        more = f" and {len(rest) - _WORST} more" if len(rest) > _WORST else ""
        shown = sorted(rest, key=lambda it: it.where.step or 0)[:_WORST]
        return f"then: {', '.join(f'{lowered(_title(it))} at step {it.where.step or 0:,}' for it in shown)}{more}"
    shown = sorted(rest, key=lambda it: -_nonfinite(it))[:_WORST]
    same = "cause" if first.cause else "rule"
    return f"of the same {same}, {len(rest)} more: {', '.join(_named(it, first) for it in shown)}"


def _named(finding: Finding, first: Finding) -> str:
    """Return a finding below another in a few words: its tensor, and rule and file where these are not the same."""
    where, many = finding.where, _nonfinite(finding)
    moment = (where.op or "").partition("optimizer_state:")[2] if where.tensor else ""
    named = f"{moment} of {subject(finding)}" if moment else subject(finding)
    parts = [
        finding.code if finding.code != first.code or not named else "",
        where.file if where.file != first.where.file else "",
        named,
        f"({many:,} not finite)" if many else "",
    ]
    return " ".join(part for part in parts if part)


def _nonfinite(finding: Finding) -> int:
    counts = (finding.evidence.get(kind) for kind in ("nans", "pos_infs", "neg_infs"))
    return sum(many for many in counts if isinstance(many, int))


def subject(finding: Finding) -> str:
    """Return the tensor or module that a finding is about; "" where it is about neither."""
    return finding.where.tensor or finding.where.module


def lowered(title: str) -> str:
    """Return a title for the middle of a line."""
    return f"{title[:1].lower()}{title[1:]}"


def finding_fold(report: Report, number: int, look: LookMark | None = None, *, is_effect: bool = False) -> Fold:
    """Return a finding: what happened where, how much, what cures it and what proves that; all else is folded."""
    finding = report.findings[number]
    made, setting = finding.prescription, setting_of(report, finding)
    code = NoCode() if made is None else code_of(made, setting, finding.cause)
    lines = code.apply or code.torch
    advice, more, fix = finding.help, "", "FIX"
    if made is not None:
        advice = made.detail if made.detail and lines else words.change(made)
        advice = f"{advice} ({words.PROVED[made.status]})"
        more = finding.help if finding.help != made.detail else ""
        fix = "TRIED" if made.status in ("failed", "worse") else "FIX"
    if is_effect:  # what cures its cause cures it
        advice, more, lines = "", finding.help, ()
    about: list[tuple[str, Line]] = [("help", more), ("where", words.place(finding.where))]
    about += [("why", (finding.cause or "").replace("_", " "))]
    about += [
        (name, figure) for key, item in words.known(finding.evidence).items() for name, figure in _figures(key, item)
    ]
    moved = words.moved_first(finding.evidence)
    blocks: list[Block] = [Text(_without_place(finding))]
    blocks += [Text(f"what moved first: {moved}")] if moved else []
    blocks += pairs([(fix, Text(advice, "" if number else "strong"))] if advice else [])
    blocks += [Code(lines=lines, language="python")] if lines else []
    blocks.append(Pairs((("WHY", f"ampdoctor rule {finding.code}"),)))
    blocks += fold("figures", Pairs(tuple((name, line) for name, line in about if line)))
    blocks += fold(
        "in plain torch", *((Code(lines=code.torch, language="python"),) if code.apply and code.torch else ())
    )
    if look is not None and look.command is not None:
        said = f"step {look.step:,} was looked at in place and left a bundle; this replays it"
        blocks += fold("its bundle", Code(title=said, lines=(look.command,), language="console"))
    blocks += fold("proof", *(pairs(_change(made)) if made is not None else ()))
    for other in made.alternatives if made is not None else ():
        tried = code_of(other, setting, finding.cause)
        code_blocks = (Code(lines=tried.apply, language="python"),) if tried.apply else ()
        blocks += fold("also tried", *pairs(_change(other)), *code_blocks)
    one_log = report.health is not None and len(report.health.runs) == 1
    title = _first_line(finding, "" if one_log else finding.where.file or "")
    return Fold(title=title, blocks=tuple(blocks), open=True, style=finding.severity, anchor=f"finding-{number}")


def _first_line(finding: Finding, file: str) -> Text:
    """Return where it happened, and in the words of its rule's page what."""
    at = finding.where
    source = at.source or at.forward_source
    replayed = "" if at.step is None else f"step {at.step}"
    stored = "" if at.global_step in (None, at.step) else f"global step {at.global_step}"
    what = f"{subject(finding)}: {lowered(_title(finding))}" if subject(finding) else _title(finding)
    line = f"{source.file}:{source.line}" if source is not None else file
    return Text("  ".join(part for part in (replayed, stored, line, what) if part), finding.severity, finding.severity)


def _title(finding: Finding) -> str:
    rule = rules().get(finding.code)  # a report of another ampdoctor may have other rules
    if rule is None:
        return finding.name.replace("-", " ")
    match finding.evidence:  # a report that is read has any evidence
        case {"outputs": [{"dtype": str(dtype)}, *_]} | {"format": str(dtype)}:
            return rule.title.replace(_DTYPE, short(dtype))
    return rule.title


def _without_place(finding: Finding) -> str:
    """Return the message without the step and the subject that the finding's first line has."""
    about = re.escape(subject(finding))
    return re.sub(rf"^step \d+(?:, {about})?: ", "", finding.message)


def _change(made: Prescription) -> Iterator[tuple[str, Line]]:
    yield "change", words.change(made)
    yield "proof", Text(words.proof(made), made.status)


def _figures(key: str, item: Any) -> list[tuple[str, Line]]:
    """Return name and value of a number of the evidence; of a list of records, those of each."""
    if isinstance(item, list | tuple) and item and all(isinstance(part, Mapping) for part in item):
        return [(f"{key}[{index}]", words.record(part)) for index, part in enumerate(item)]
    return [(key, words.record(item) if isinstance(item, Mapping) else words.value(item))]


def kept_looks(report: Report) -> dict[int, LookMark]:
    """Return, by finding, the look at the finding's own step that has kept a bundle."""
    runs = report.health.runs if report.health is not None else ()
    found = {}
    for number, finding in enumerate(report.findings):
        at = finding.where
        run = next((run for run in runs if run.source == at.file), runs[0] if runs else None)
        looks = run.looks if run is not None and at.step is not None else ()
        of_it = next((look for look in looks if look.bundle and look.step == at.step), None)
        if of_it is not None:
            found[number] = of_it
    return found


# -- checks, gates, and what a training has left --


def _checks(report: Report) -> Iterator[Block]:
    """Yield the checks; those that are in order are folded where something is wrong."""
    rest = [(check.name, check.result, check.headroom) for check in report.checks]
    for path in [path for path in report.target.get("paths", ()) if isinstance(path, str)]:
        head = f"{path}: "
        own = [(name.removeprefix(head), result, room) for name, result, room in rest if name.startswith(head)]
        rest = [row for row in rest if not row[0].startswith(head)]
        if own:
            yield Heading(text=path)
            yield from _checked(report, own)
    yield from _checked(report, rest)


def _checked(report: Report, checks: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Iterator[Block]:
    rows: dict[bool, list[tuple[str, Line]]] = {True: [], False: []}
    absent: dict[str, list[str]] = {}
    for name, result, room in checks:
        if result in _ABSENT:
            absent.setdefault(result, []).append(name)
        elif name == FINITE_CHECK and result == "found":
            rows[False].append(("not finite", _not_finite(report)))
        else:
            figures = [_figure(key, item) for key, item in room.items()] if result in _IN_A_WORD else []
            beside = f" ({', '.join(filter(None, figures))})" if any(figures) else ""
            rows[report.verdict == "sick" and result == "ok"].append((name, f"{result.replace('_', ' ')}{beside}"))
    yield from pairs([*rows[False], *((result, ", ".join(names)) for result, names in absent.items())])
    yield from fold(f"{words.count(len(rows[True]), 'check')} in order", *pairs(rows[True]))
    # a sentence has the numbers that matter itself
    said = [
        (name, words.settings(room, words.value)) for name, result, room in checks if room and result not in _IN_A_WORD
    ]
    yield from fold("figures of the checks", *pairs(said))


def _not_finite(report: Report) -> str:
    """Return what a replay has seen that is not finite: by the path of the values, or by the findings."""
    if report.path is None:
        steps = [finding.where.step for finding in report.findings if finding.where.nonfinite != "none"]
        return f"see step {steps[0]}" if steps and steps[0] is not None else "see above"
    first, *others = sorted(report.path.affected, key=lambda name: name != "loss") or ["a value"]
    more = f" and {words.count(len(others), 'more value')}" if others else ""
    return f"{first.replace(':', ' of ', 1).replace('grad of', 'gradient of')}{more} of step {report.path.step}"


def _figure(name: str, item: Any) -> str:
    """Return a figure of a check in words; "" for one that says nothing."""
    said = name.replace("_", " ")
    if (name == "ranks" and item == 1) or (name in _SHARES and not item):
        return ""
    if item is True:
        return said
    if name in _SHARES:
        return f"{words.percent(item)} {said}"
    if name.startswith("log2") and isinstance(item, int | float):
        return (
            f"2^{item:.0f} times the smallest that works"
            if name == "log2_above_dead"
            else f"{figure(2.0**item)} times below the limit"
        )
    if isinstance(item, int) and said.endswith(("s", "ed")):
        noun = said.removesuffix("ies") + "y" if said.endswith("ies") else said.removesuffix("s")
        return words.count(item, noun) if said.endswith("s") else f"{item:,} {said}"
    return f"{said} {words.number(item)}"


def _set_aside(report: Report) -> Iterator[Block]:
    baseline, fixed = report.baseline, words.fixed(report)
    if report.suppressed:
        known = [one for one in report.suppressed if one.by == "baseline"]
        ignored = len(report.suppressed) - len(known)
        parts = [f"{len(known)} by the baseline {known[0].reason}"] if known else []
        parts += [f"{ignored} by an ignore"] if ignored else []
        title = f"{words.count(len(report.suppressed), 'finding')} set aside: {', '.join(parts)}"
        rows = (
            (
                f"{it.by}: {it.reason}",
                Text(
                    f"{it.finding.code} {it.finding.name}: {it.finding.message} ({words.place(it.finding.where)})",
                    it.finding.severity,
                    it.finding.severity,
                ),
            )
            for it in report.suppressed
        )
        yield from fold(title, *pairs(rows))
    if baseline is not None and fixed:
        gone = f"{words.count(len(fixed), 'finding')} of the baseline {baseline.file} no longer there"
        yield Text(f"{gone}; to write it anew: --write-baseline {baseline.file}")
        gone_by = [("fixed", words.fixed_line(entry)) for entry in fixed]
        yield from pairs(gone_by[:_IN_FULL])
        yield from fold(f"{len(gone_by) - _IN_FULL} more fixed", *pairs(gone_by[_IN_FULL:]))


def _kept(report: Report) -> Iterator[Block]:
    """Yield what a watched training has kept, and how to replay it."""
    kept = report.run.get("kept") or {}
    if not kept.get("health"):
        return
    yield Pairs(((kept["health"], "the log; ampdoctor health judges it"),))
    if kept.get("bundle"):
        name = str(kept.get("model", "")).rpartition(":")[2]
        maker = f", once {name}() returns its model" if name == "make_model" else ""
        begins = " from a checkpoint of before it (--checkpoint)," if kept.get("from_checkpoint") else ""
        title = f"{kept['bundle']}: the step, to be replayed{begins} on any machine{maker}"
        yield Code(title=title, lines=(bundle_command(report),), language="console")
