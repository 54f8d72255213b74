"""The next step after a report: one action for a person who may read only the last line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, TypeAlias

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.outcome import comparison_left_out
from ampdoctor.evidence.python_lines import autocast_step
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.reports import text
from ampdoctor.reports.fix_code import code_of, setting_of

_CONFIGURATION = frozenset(("AMP911", "AMP912"))  # findings about the configuration, not the report's subject
_NOT_FINITE_IN_FP32 = "AMP206"  # a profile with this finding has no ranges to derive settings from
_HALF = {"fp16": "float16", "bf16": "bfloat16"}
_Options: TypeAlias = Mapping[str, Sequence[str]]  # options of a command line with their values; a flag has none


@dataclass(frozen=True, slots=True)
class Step:
    """One action."""

    said: str
    line: str = ""  # the command to type or the line to paste; "" where the words are enough

    def __str__(self) -> str:
        return f"{self.said}: {self.line}" if self.line else self.said


def next_step(report: Report) -> Step:
    """Return the one thing to do after this report; a command names files that exist, and is not the one just run."""
    if not report.complete:
        return _incomplete(report)
    if report.baseline is not None and report.baseline.written:
        return Step(f"the baseline is written; from now on add --baseline {shlex.quote(report.baseline.file)}")
    if report.verdict == "not_judged":
        return _not_judged(report)
    if report.verdict == "not_reproduced":
        return _not_reproduced(report)
    if report.verdict == "inconclusive" and any(one.kind == "not_in_half" for one in report.skipped):
        return Step("let it compute in the format that it says, as left out above says, and run the same command again")
    if report.verdict == "inconclusive" and _cured(report) is None:
        return Step("nothing is settled: give what is missing, and run the same command again")
    return _set_aside(report) or _judged(report)


def bundle_command(report: Report) -> str:
    """Return the command that replays the bundle of a watched training; "" where none was kept.

    A bundle without weights also takes `--checkpoint`, and nobody but the user knows with which file.
    """
    kept = report.run.get("kept") or {}
    options: _Options = {"--model": [kept["model"]]} if kept.get("model") else {}
    return _command("bisect-nan", kept["bundle"], more=options) if kept.get("bundle") else ""


def _incomplete(report: Report) -> Step:
    if again := bundle_command(report):
        with_what = " and add --checkpoint with one from before it" if report.run["kept"].get("from_checkpoint") else ""
        return Step(f"the step was not replayed during training; replay its bundle{with_what}", again)
    if any(error.kind == "interrupted" for error in report.errors):
        return Step("give the same command more time, or start it from a later checkpoint")
    what = f"{report.errors[0].what} ({report.errors[0].kind})" if report.errors else "what could not be examined"
    more = f" and {len(report.errors) - 1} more" if len(report.errors) > 1 else ""
    return Step(f"mend or fetch anew {what}{more}, then run the same command again")


def _not_judged(report: Report) -> Step:
    if report.command == "run":
        log = (report.run.get("kept") or {}).get("health")
        return Step("nothing; its log is judged by", _command("health", log)) if log else Step("nothing")
    if report.command == "health":
        runs = report.health.runs if report.health is not None else ()
        if runs and all(run.format == "ampdoctor" for run in runs):
            return Step("let it train on, and ask again")
        return Step("let it log every step (logging_steps=1, log_every_n_steps=1), or watch it with ampdoctor run")
    if report.structure is not None:
        return Step("to have it examined", _command("scan", _path(report)))
    if any(one.kind == "lfs_pointer" for one in report.skipped):
        return Step("fetch what the pointers stand for, then run the same command again", "git lfs pull")
    return Step("nothing; what was named lies beside checkpoints, and holds no weights, moments or scaler")


def _not_reproduced(report: Report) -> Step:
    """Search everything that is there, then come closer to the failure: its checkpoint first, then more steps."""
    options = dict(report.target.get("options") or {})
    cut = comparison_left_out(report)
    if cut is not None:
        options.pop("--compare-steps", None)
        again = _replay(report.command, {**report.target, "options": options}, {"--expect-failure": []})
        return Step(f"leave out {cut}: what stays finite shows beside fp32", again)
    if report.target.get("checkpoint") is None:
        return Step("start from the last checkpoint before the failure: add --checkpoint")
    return Step("go further", _further(report, {"--expect-failure": []}))


def _further(report: Report, more: _Options = MappingProxyType({})) -> str:
    """Return the command that replays twice as many steps."""
    steps, options = report.run.get("steps"), report.target.get("options") or {}
    option = "--max-steps" if "--until-sick" in options else "--steps"
    further = {option: [str(2 * steps)]} if isinstance(steps, int) and steps else {}
    return _replay(report.command, report.target, {**further, **more})


def _all_finite(report: Report) -> Step:
    """Return how to look at what comes after the replayed steps of a healthy run."""
    if log := (report.run.get("kept") or {}).get("health"):
        return Step("a watched run of this script went further; its log says how it went", _command("health", log))
    factory, arguments = str(report.target.get("factory") or ""), report.target.get("arguments") or ()
    options = dict(report.target.get("options") or {})
    if factory.endswith(".py") and "--until-sick" not in options:
        options.pop("--steps", None)
        again = _replay("bisect-nan", {**report.target, "options": options}, {"--until-sick": []})
        return Step("if a later step fails, run on until it does (or watch the whole training: ampdoctor run)", again)
    if factory.endswith(".py"):
        watched = _command("run", factory, after=arguments)
        return Step("if a later step fails, watch the whole training", watched)
    if any(one.what == "further batches" for one in report.skipped):
        return Step("if a later step fails, replay more", _further(report))
    return Step("nothing; if the run fails for you, start from its last checkpoint before that: add --checkpoint")


def _set_aside(report: Report) -> Step | None:
    if report.baseline is not None and report.baseline.fixed and not report.findings:
        return Step(f"write the baseline anew: add --write-baseline {shlex.quote(report.baseline.file)}")
    behind = next((one.what for one in report.skipped if one.kind == "not_replayed"), None)
    if report.suppressed and not report.findings and behind is not None:
        return Step(f"nothing new, but {behind} were not replayed: mend what is set aside there to see what comes next")
    if report.suppressed and not report.findings:
        return Step("nothing new: what was found has been set aside before, each for its reason")
    counting = [finding for finding in report.findings if finding.severity != "note"] or report.findings
    if (report.command == "scan" or report.verdict == "sick") and {f.code for f in counting} <= _CONFIGURATION:
        return Step("mend the configuration: take out the ignores that are named, or renew them") if counting else None
    return None


def _judged(report: Report) -> Step:
    if report.plan is not None:
        return _planned(report.plan)
    if report.command == "scan":
        return _scanned(report)
    if report.command == "health":
        return _over_time(report)
    if report.command == "profile" and all(finding.code != _NOT_FINITE_IN_FP32 for finding in report.findings):
        saved = report.run.get("saved")
        again = _command("recommend", saved) if saved else _recommend(report.target)
        return Step("have settings derived from this", again)
    if report.verdict == "sick" or _cured(report) is not None:
        return _sick(report)
    warned = next((finding for finding in report.findings if finding.severity == "warning"), None)
    if report.command == "bisect-nan" and warned is not None:
        return _its_page(warned)
    return _all_finite(report) if report.command == "bisect-nan" else _recommended(report)


def _scanned(report: Report) -> Step:
    """Return how to go on from an earlier checkpoint: a checkpoint itself shows no cause."""
    trend, change, members = report.trend, report.change, report.target.get("members", ())
    if report.verdict != "sick":
        if any(one.get("collapsed") for one in members) and trend is not None and trend.last_healthy is not None:
            return _resume(trend.last_healthy, "the last one before the loss scale collapsed")
        warned = next((finding for finding in report.findings if finding.severity == "warning"), None)
        if warned is not None:
            return _its_page(warned)
        return Step("nothing; in CI the same command stops the job at a sick checkpoint, by exit code 1")
    if report.findings and not any(f.severity == "error" and _ruins(f) for f in report.findings):
        return _its_page(report.findings[0])
    finite = change is not None and not any(tensor.old_nonfinite for tensor in change.tensors)
    if change is not None and finite and (change.old.scale is None or change.old.scale >= 1.0):
        return _resume((report.target.get("against") or {}).get("path", "the older one"), "which is finite")
    if trend is None or not members:  # several paths have no common folder
        return _earlier(report)
    sick = [at for at, one in enumerate(members) if one["name"] == trend.first_sick]
    sick = sick or [at for at, one in enumerate(members) if trend.first_sick is None and one["verdict"] == "sick"]
    fine = [at for at, one in enumerate(members) if one["verdict"] == "healthy" and not one.get("collapsed")]
    before = [at for at in fine if not sick or at < sick[0]]
    if not before and fine:
        return _resume(members[fine[-1]]["name"], "which is healthy; none before the first sick one is")
    if not before:
        return Step("no earlier one is healthy: train from the start, watched by ampdoctor run")
    searched = trend.first_sick is not None or len(members) == report.target.get("count")
    said = "the last healthy one" if searched else "the last healthy one that was read (--all reads every one)"
    return _resume(members[before[-1]]["name"], said)


def _resume(name: str, why: str) -> Step:
    return Step(f"resume from {name}, {why}, and watch the training with ampdoctor run")


def _earlier(report: Report) -> Step:
    """Return where other checkpoints of the training lie, if some do."""
    where = report.target.get("location") or report.target.get("path")
    if not isinstance(where, str) or "paths" in report.target or not _has_others(Path(where)):
        return Step("resume from an earlier checkpoint, and watch the training with ampdoctor run")
    folder = PurePath(where).parent if PurePath(where).name else PurePath("..")
    return Step("resume from an earlier checkpoint; see which are healthy", _command("scan", str(folder)))


_DIGITS = re.compile(r"\d+")


def _has_others(path: Path) -> bool:
    """Whether a file or folder whose name differs in its numbers alone, as step-10 and step-20, lies beside it."""
    try:
        here = path.resolve()
        names = {other.name for other in here.parent.iterdir()} - {here.name}
    except OSError:
        return False
    return _DIGITS.sub("", here.name) in {_DIGITS.sub("", name) for name in names}


def _over_time(report: Report) -> Step:
    runs = report.health.runs if report.health is not None else ()
    command = next((look.command for run in runs for look in run.looks if look.command is not None), None)
    grave = [finding for finding in report.findings if finding.severity != "note"]
    good = [mark for run in runs for mark in run.checkpoints if mark.health == "good"]
    resume = f"resume from {good[-1].path} (step {good[-1].step:,}); " if good else ""
    if grave and command is not None:
        return Step(f"{resume}the sick step was kept, and is replayed by", command)
    if grave:
        page = _its_page(grave[0])
        return Step(f"{resume}{page.said}", page.line)
    logs = [str(path) for path in report.target.get("paths") or [_path(report)]]
    return Step("nothing; in CI this tells when that changes", _command("health", *logs, "--fail-on", "warning"))


def _sick(report: Report) -> Step:
    """Return the first proven change, else what the first finding's own change leaves to do."""
    finding = _cured(report) or report.findings[0]
    made = finding.prescription
    if made is None:
        return _its_page(finding)
    code = code_of(made, setting_of(report, finding), finding.cause)
    place = "once the model is built" if code.apply else "into the training loop" if code.torch else ""
    if made.verified:
        return Step(f"paste the lines of the fix {place}, then run it again" if place else text.change(made))
    if finding.code == _NOT_FINITE_IN_FP32 and report.command != "bisect-nan":
        return Step("find where it breaks", _replay("bisect-nan", report.target))
    if finding.code == _NOT_FINITE_IN_FP32:
        return Step("lower the learning rate or clip the gradients")
    if made.kind == "code":
        return _in_the_code(finding, report)
    if report.command == "recommend" and report.scaler is not None and report.scaler.change:
        return _recommended(report)
    return Step("paste the lines of the fix, which no replay has proved") if place else _its_page(finding)


_PLACE = re.compile(r"[^\s:]+\.py:\d+(?=: )")
"""The line that a change of the code begins with; it may come before the line that failed."""


def _in_the_code(finding: Finding, report: Report) -> Step:
    if _ruins(finding):
        return _its_page(finding) if report.target.get("checkpoint") is None else _earlier(report)
    source, where = finding.where.source, finding.where
    named = _PLACE.match(str(finding.prescription.value)) if finding.prescription is not None else None
    at = f" at {named[0]}" if named else f" at {source.file}:{source.line}" if source is not None else ""
    change = f"change the code{at} as {finding.code} says"
    if source is not None and source.installed:
        change = f"change your own code as {finding.code} says (the line shown is an installed package's)"
    again = bundle_command(report)
    if again and (where.module or (where.module == "" and where.phase == "forward")):  # else the tape has the code
        return Step(f"{change}; the bundle shows whether that helps", again)
    return Step(change, _command("rule", finding.code))


def _ruins(finding: Finding) -> bool:
    """Whether only an earlier checkpoint helps. Any other finding may be an error only by a project's settings."""
    rule = rules().get(finding.code)
    return rule is not None and rule.ruins_checkpoint


def _its_page(finding: Finding) -> Step:
    return Step("read what can be done", _command("rule", finding.code))


def _cured(report: Report) -> Finding | None:
    """Return the first finding with a proven change; a note counts only in a sick report."""
    proved = (f for f in report.findings if f.prescription is not None and f.prescription.verified)
    return next((f for f in proved if f.severity != "note" or report.verdict == "sick"), None)


def _planned(section: PlanSection) -> Step:
    plan = section.use or section.fewer
    if plan is None:
        return Step("nothing fits or divides: change the cluster, its parallel sizes, or the batch")
    cut = f"micro-batch {plan.micro_batch}, accumulation {plan.accumulation}"
    if plan.devices < section.after.devices:
        return Step(f"train on {plan.devices} of {section.after.devices} devices with {cut}: --to-gpus {plan.devices}")
    if section.emit is not None:
        return Step(f"put the settings shown into your configuration: {cut}")
    return Step(f"train with {cut}; --emit says it in a framework's words")


def _recommended(report: Report) -> Step:
    """Return the precision's change, else the scaler's, else the first remedy: one at a time."""
    scaler, advice = report.scaler or ScalerSection(), report.precision
    own = report.run.get("precision")
    if (
        advice is not None
        and own in _HALF
        and advice.precision != own
        and advice.precision in _HALF
        and not scaler.emit
    ):
        lines = autocast_step(setting_of(report).device, _HALF[advice.precision])
        return Step(f"train in {advice.precision}{'' if own == 'bf16' else ', without a GradScaler'}", lines[0])
    if not scaler.change and advice is not None and advice.remedies:
        return _remedy(advice.remedies[0])
    if not scaler.change:
        gate = _recommend(report.target, {"--fail-on": ["warning"]})
        return Step("nothing; in CI this tells when that changes", gate)
    if scaler.emit:
        return Step("put the settings shown into your configuration")
    settings = asdict(scaler.recommended) if scaler.recommended is not None else {}
    return Step("build your scaler with these settings", f"torch.amp.GradScaler({text.settings(settings)})")


def _remedy(said: str) -> Step:
    """Return a remedy; with the line to write, where it is what to give to a loss."""
    why, is_given, argument = said.partition(": give it ")
    line = f"torch.nn.functional.cross_entropy({argument}, target)" if why.startswith("cross_entropy") else argument
    return Step(f"{why}; give it wider inputs", line) if is_given else Step(said)


def _path(report: Report) -> str:
    return str(report.target.get("location") or report.target.get("path") or ".")


def _recommend(target: Mapping[str, Any], more: _Options = MappingProxyType({})) -> str:
    advice: _Options = {**(target.get("advice_options") or {}), **more}
    if not target.get("profile"):
        return _replay("recommend", target, advice)
    return _command("recommend", target["profile"], more=advice)


def _replay(command: str, target: Mapping[str, Any], more: _Options = MappingProxyType({})) -> str:
    """Return a command that replays a report's run; "" if its factory is not known. `more` overrides its options."""
    if not target.get("factory") or "profile" in target:
        return ""
    options: dict[str, Sequence[str]] = dict(target.get("options") or {})
    if target.get("checkpoint"):
        options["--checkpoint"] = [target["checkpoint"]]
    own = {name: values for name, values in sorted(options.items()) if name not in more}
    after = ["--", *target["arguments"]] if target.get("arguments") else []
    return _command(command, target["factory"], more={**own, **more}, after=after)


def _command(*words: str, more: _Options = MappingProxyType({}), after: Sequence[str] = ()) -> str:
    typed = [word for name, values in more.items() for word in ([w for v in values for w in (name, v)] or [name])]
    return f"ampdoctor {shlex.join([*words, *typed, *after])}"
