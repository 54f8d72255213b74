"""The next step after a report: one action for a person who may read only the last line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.outcome import comparison_left_out
from ampdoctor.evidence.report import BaselineSection, Finding, Report
from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.evidence.report_scan import ChangeSection
from ampdoctor.reports import text
from ampdoctor.reports.fix_code import Code, code_of, setting_of

_CONFIGURATION = frozenset(("AMP911", "AMP912"))  # findings about the configuration, not the report's subject
_NOT_FINITE_IN_FP32 = "AMP206"  # a profile with this finding has no ranges to derive settings from
_REPLAYED = frozenset(("AMP722", "AMP723"))  # findings of a log whose op a replay from a checkpoint would find
_Options: TypeAlias = Mapping[str, Sequence[str]]  # options of a command line with their values; a flag has none


@dataclass(frozen=True, slots=True)
class Step:
    """One action."""

    said: str
    line: str = ""  # the command to type or the line to paste; "" where the words are enough

    def __str__(self) -> str:
        return f"{self.said}: {self.line}" if self.line else self.said


_EARLIER = Step("resume from an earlier checkpoint; the last healthy one is found by", "ampdoctor scan FOLDER")


def next_step(report: Report) -> Step:
    """Return the one thing to do after this report."""
    if not report.complete and bundle_command(report):
        return Step("the step was not run again in place; its bundle may be, here or elsewhere", bundle_command(report))
    if not report.complete:
        return _incomplete(report)
    if report.baseline is not None and report.baseline.written:
        return Step(
            "the baseline is written; from now on the same command with", _option("--baseline", report.baseline)
        )
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
    """Return the command that replays the bundle of a watched training; "" where none was kept."""
    kept = report.run.get("kept") or {}
    if not kept.get("bundle"):
        return ""
    checkpoint = ["--checkpoint", "CHECKPOINT"] if kept.get("from_checkpoint") else []
    return _command(
        "bisect-nan", kept["bundle"], *checkpoint, *(["--model", kept["model"]] if kept.get("model") else [])
    )


def _not_judged(report: Report) -> Step:
    if report.command == "run":
        log = (report.run.get("kept") or {}).get("health")
        return Step("nothing; its log is judged by", _command("health", log)) if log else Step("nothing")
    if report.command == "health":
        runs = report.health.runs if report.health is not None else ()
        if runs and all(run.format == "ampdoctor" for run in runs):
            return Step("let it train on, and ask again", _command("health", _path(report)))
        return Step(
            "let it log every step (logging_steps=1, log_every_n_steps=1), or watch it", "ampdoctor run train.py"
        )
    if report.structure is not None:
        return Step("to have it examined", _command("scan", _path(report)))
    if any(one.kind == "lfs_pointer" for one in report.skipped):
        return Step("fetch what the pointers stand for, then run the same command again", "git lfs pull")
    return Step("nothing; what was named lies beside checkpoints, and holds no weights, moments or scaler")


def _set_aside(report: Report) -> Step | None:
    if report.baseline is not None and report.baseline.fixed and not report.findings:
        return Step("write the baseline anew by the same command with", _option("--write-baseline", report.baseline))
    behind = next((one.what for one in report.skipped if one.kind == "not_replayed"), None)
    if report.suppressed and not report.findings and behind is not None:
        return Step(f"nothing new, but {behind} were not replayed: mend what is set aside there to see what comes next")
    if report.suppressed and not report.findings:
        return Step("nothing new: what was found has been set aside before, each for its reason")
    if _only_configuration(report):
        return Step("mend the configuration: take out the ignores that are named, or renew them")
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
    return _healthy(report)


def _incomplete(report: Report) -> Step:
    if any(error.kind == "interrupted" for error in report.errors):
        return Step("give the same command more time, or start it from a later checkpoint")
    what = f"{report.errors[0].what} ({report.errors[0].kind})" if report.errors else "what could not be examined"
    more = f" and {len(report.errors) - 1} more" if len(report.errors) > 1 else ""
    return Step(f"mend or fetch anew {what}{more}, then run the same command again")


def _not_reproduced(report: Report) -> Step:
    """Search everything that is there, then come closer to the failure: its checkpoint first, then more steps."""
    cut = comparison_left_out(report)
    if cut is not None:
        options = dict(report.target.get("options") or {})
        options.pop("--compare-steps", None)
        again = _replay(report.command, {**report.target, "options": options}, {"--expect-failure": []})
        return Step(f"leave out {cut}: what stays finite shows beside fp32", again)
    if report.target.get("checkpoint") is None:
        return Step("start from the last checkpoint before the failure", _from_its_checkpoint(report))
    steps = report.run.get("steps")
    option = "--max-steps" if "--until-sick" in (report.target.get("options") or {}) else "--steps"
    further = {option: [str(2 * steps)]} if isinstance(steps, int) and steps else {}
    return Step("go further", _replay(report.command, report.target, {**further, "--expect-failure": []}))


def _scanned(report: Report) -> Step:
    """Return how to go on from an earlier checkpoint, or replay from there: a checkpoint itself shows no cause."""
    if report.verdict != "sick":
        warned = next((finding for finding in report.findings if finding.severity == "warning"), None)
        collapsed = any(member.get("collapsed") for member in report.target.get("members", ()))
        if collapsed and report.trend is not None and (before := report.trend.last_healthy) is not None:
            return _resume(before, f"{_path(report)}/{before}", "the last one before the loss scale collapsed")
        if warned is not None:
            return _its_page(warned)
        return Step("nothing; in CI the same command stops the job at a sick checkpoint, by exit code 1")
    if report.findings and not any(f.severity == "error" and _ruins(f) for f in report.findings):
        return _its_page(report.findings[0])
    if report.change is not None and _finite_before(report.change):
        older = report.target.get("against") or {}
        return _resume(older.get("path", "OLD"), older.get("location") or older.get("path", "OLD"), "which is finite")
    if report.trend is None or "members" not in report.target:  # several paths have no common folder
        return _EARLIER
    first_sick, members = report.trend.first_sick, report.target["members"]
    last = _healthy_before(members, first_sick)
    if last is None:
        healthy = [m["name"] for m in members if m["verdict"] == "healthy" and not m.get("collapsed")]
        if healthy:
            again = f"{_path(report)}/{healthy[-1]}"
            return _resume(healthy[-1], again, "which is healthy; none before the first sick one is")
        return Step("no earlier one is healthy: find what breaks from the start", _command("bisect-nan", "FACTORY"))
    searched = first_sick is not None or len(members) == report.target.get("count")
    said = "the last healthy one" if searched else "the last healthy one that was read (--all reads every one)"
    return _resume(last, f"{_path(report)}/{last}", said)


def _over_time(report: Report) -> Step:
    runs = report.health.runs if report.health is not None else ()
    command = next((look.command for run in runs for look in run.looks if look.command is not None), None)
    grave = [finding for finding in report.findings if finding.severity != "note"]
    if grave and command is not None:
        return Step("the sick step was kept, and is replayed by", command)
    if any(finding.severity == "error" and finding.code in _REPLAYED for finding in grave):
        again = _command("bisect-nan", "FACTORY", "--checkpoint", "CHECKPOINT")
        return Step("replay it from the last checkpoint before that step", again)
    if grave:
        return _its_page(grave[0])
    logs = [str(path) for path in report.target.get("paths") or [_path(report)]]
    return Step("nothing; in CI this tells when that changes", _command("health", *logs, "--fail-on", "warning"))


def _resume(name: str, path: str, why: str) -> Step:
    again = _command("bisect-nan", "FACTORY", "--checkpoint", path)
    return Step(f"resume from {name}, {why}; what breaks after it is found by", again)


def _finite_before(change: ChangeSection) -> bool:
    scale = change.old.scale
    return not any(tensor.old_nonfinite for tensor in change.tensors) and (scale is None or scale >= 1.0)


def _only_configuration(report: Report) -> bool:
    """Whether all findings that count (or, if none counts, all others) are about the configuration."""
    if report.command != "scan" and report.verdict != "sick":
        return False
    counting = [finding for finding in report.findings if finding.severity != "note"] or report.findings
    return bool(counting) and all(finding.code in _CONFIGURATION for finding in counting)


def _path(report: Report) -> str:
    return str(report.target.get("location") or report.target.get("path") or "PATH")


def _healthy_before(members: Sequence[Mapping[str, Any]], first_sick: str | None) -> str | None:
    """Return the last healthy checkpoint before `first_sick`; if that is None, before the first sick member."""
    last = None
    for member in members:
        if member["name"] == first_sick or (first_sick is None and member["verdict"] == "sick"):
            return last
        if member["verdict"] == "healthy" and not member.get("collapsed"):
            last = str(member["name"])
    return last


def _sick(report: Report) -> Step:
    """Return the first proven change, else what the first finding's own change leaves to do."""
    finding = _cured(report) or report.findings[0]
    prescription = finding.prescription
    if prescription is None:
        return _its_page(finding)
    code = code_of(prescription, setting_of(report, finding), finding.cause)
    if prescription.verified and code.apply:
        return Step(f"paste the lines shown once the model is built: {_proved('they are', 'them', finding, report)}")
    if prescription.verified and prescription.kind == "scaler" and code.torch:
        return Step(f"put the scaler shown into the training loop: {_proved('it is', 'it', finding, report)}")
    if prescription.verified:
        return Step(f"{text.change(prescription)}: {_proved('that is', 'it', finding, report)}")
    if finding.code == _NOT_FINITE_IN_FP32 and report.command != "bisect-nan":
        return Step("find where it breaks", _replay("bisect-nan", report.target))
    if finding.code == _NOT_FINITE_IN_FP32:
        return Step("lower the learning rate or clip the gradients, then run the same command again")
    if prescription.kind == "code":
        return _in_the_code(finding, report)
    if report.command == "recommend" and report.scaler is not None and report.scaler.change:
        return _recommended(report)
    if code == Code():  # a replay has disproved the change
        return _its_page(finding)
    return Step(f"paste the lines shown, which no replay has proved, {_then(report)}")


def _proved(they_are: str, them: str, finding: Finding, report: Report) -> str:
    """Return how far a change is proven: a recorded or last step shows nothing about later steps."""
    # Where a kernel is at fault, another format runs another kernel, which proves no cure
    shown = report.proof
    made = finding.prescription
    if shown is not None and made is not None and (shown.kind, shown.value) == (made.kind, made.value):
        alone = sum(step.with_ is not None for step in shown.steps) + shown.omitted == 1
        if alone and finding.severity == "error":
            return f"with {them} this step, replayed, stays finite"
    if finding.cause == "kernel_defect" and made is not None and made.kind != "code":  # another format, another kernel
        return f"with {them} this run stays finite, a way around the kernel that proves no cause"
    proved = "cure this run" if finding.severity == "error" else f"mend what {finding.code} says"
    return f"{they_are} proved to {proved}"


def _ruins(finding: Finding) -> bool:
    """Whether only an earlier checkpoint helps. Any other finding may be an error only by a project's settings."""
    rule = rules().get(finding.code)
    return rule is not None and rule.ruins_checkpoint


def _in_the_code(finding: Finding, report: Report) -> Step:
    if _ruins(finding):
        return _its_page(finding) if report.target.get("checkpoint") is None else _EARLIER
    source = finding.where.source
    if source is not None and source.installed:
        change = f"change your own code as {finding.code} says (the line shown is an installed package's)"
    else:
        at = f" at {source.file}:{source.line}" if source is not None else ""
        change = f"change the code{at} as {finding.code} says"
    again = bundle_command(report)
    where = finding.where
    in_model = where.module or (where.module == "" and where.phase == "forward")
    if again and in_model:  # the code around the model is replayed as it was recorded
        return Step(f"{change}; the bundle shows whether that helps", again)
    return Step(f"{change}, {_then(report)}")


def _then(report: Report) -> str:
    """Return how to see the effect of a change: a profile saved before it never changes."""
    return "then measure a new profile" if report.target.get("profile") else "then run the same command again"


def _its_page(finding: Finding) -> Step:
    return Step("read what can be done", _command("rule", finding.code))


def _cured(report: Report) -> Finding | None:
    """Return the first finding with a proven change; a note counts only in a sick report."""
    proved = (f for f in report.findings if f.prescription is not None and f.prescription.verified)
    return next((f for f in proved if f.severity != "note" or report.verdict == "sick"), None)


def _healthy(report: Report) -> Step:
    warned = next((finding for finding in report.findings if finding.severity == "warning"), None)
    if report.command == "bisect-nan" and warned is not None:
        return _its_page(warned)
    if report.command == "bisect-nan":
        again = _from_its_checkpoint(report)
        return Step("nothing; if the run fails for you, start from its last checkpoint before that", again)
    return _recommended(report)


def _from_its_checkpoint(report: Report) -> str:
    return _replay(report.command, report.target, {"--checkpoint": ["PATH"], "--expect-failure": []})


def _planned(section: PlanSection) -> Step:
    plan = section.use or section.fewer
    if plan is None:
        return Step("nothing fits or divides: change the cluster, its parallel sizes, or the batch")
    idle = section.after.devices - plan.devices
    cut = f"micro-batch {plan.micro_batch}, accumulation {plan.accumulation}"
    if idle:
        return Step(f"train on {plan.devices} of {section.after.devices} devices with {cut}: --to-gpus {plan.devices}")
    if section.emit is not None:
        return Step(f"put the settings shown into your configuration: {cut}")
    return Step(f"train with {cut}; --emit says it in a framework's words")


def _recommended(report: Report) -> Step:
    scaler = report.scaler or ScalerSection()
    remedies = report.precision.remedies if report.precision is not None else ()
    if not scaler.change and remedies:
        return Step(remedies[0])
    if not scaler.change:
        gate = _recommend(report.target, {"--fail-on": ["warning"]})
        return Step("nothing; in CI this tells when that changes", gate)
    if scaler.emit:
        return Step("put the settings shown into your configuration")
    settings = asdict(scaler.recommended) if scaler.recommended is not None else {}
    arguments = ", ".join(f"{key}={text.setting(item)}" for key, item in settings.items())
    return Step("build your scaler with these settings", f"torch.amp.GradScaler({arguments})")


def _option(name: str, baseline: BaselineSection) -> str:
    return shlex.join([name, baseline.file])


def _recommend(target: Mapping[str, Any], more: _Options = MappingProxyType({})) -> str:
    advice: _Options = target.get("advice_options") or {}
    if not target.get("profile"):
        return _replay("recommend", target, {**advice, **more})
    return _command("recommend", target["profile"], *_typed({**advice, **more}))


def _replay(command: str, target: Mapping[str, Any], more: _Options = MappingProxyType({})) -> str:
    """Return a command that replays a report's run (FACTORY if it is not known); `more` overrides its options."""
    if not target.get("factory") or "profile" in target:
        return _command(command, "FACTORY", *_typed(more))
    options: dict[str, Sequence[str]] = dict(target.get("options") or {})
    if target.get("checkpoint"):
        options["--checkpoint"] = [target["checkpoint"]]
    own = {name: values for name, values in sorted(options.items()) if name not in more}
    after = ["--", *target["arguments"]] if target.get("arguments") else []
    return _command(command, target["factory"], *_typed({**own, **more}), *after)


def _typed(options: _Options) -> list[str]:
    return [word for name, values in options.items() for word in _each(name, values)]


def _each(name: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (name, value)] if values else [name]


def _command(*arguments: str) -> str:
    return f"ampdoctor {shlex.join(arguments)}"
