"""The report: what every command returns and every renderer reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from ampdoctor import evidence
from ampdoctor.evidence.checkpoint_stats import TensorRow
from ampdoctor.evidence.json_records import UNWRITTEN, Count, Shape, Text, form
from ampdoctor.evidence.location import Place, Source, Where
from ampdoctor.evidence.report_health import HealthSection
from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.report_profile import ProfileSection
from ampdoctor.evidence.report_replay import FP32_CHECK, NOT_COMPARED, PathSection, Proof, ProofSection
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.evidence.report_scan import ChangeSection, StructureSection, TrendSection
from ampdoctor.evidence.report_target import Run, Target
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.evidence.thresholds import MovedThreshold

SCHEMA_VERSION = "2"

Command = Literal["scan", "bisect-nan", "profile", "recommend", "run", "health", "plan"]
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""

Cause = Literal[
    "bad_checkpoint",
    "scaler_misuse",
    "stale_casts",
    "bad_data",
    "invalid_op",
    "kernel_defect",
    "forward_overflow",
    "forward_precision",
    "backward_overflow",
    "grad_overflow",
    "scaler_collapse",
    "grad_underflow",
    "optimizer_precision",
]
Verdict = Literal["sick", "healthy", "not_reproduced", "inconclusive", "not_judged"]
"""`not_judged`: only the structure was asked for, or everything was left out."""
PrescriptionKind = Literal["fp32_modules", "dtype", "init_scale", "scaler", "skip_batch", "optimizer", "code"]
PrescriptionStatus = Literal["verified", "failed", "worse", "intervention", "not_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prescription:
    """One change that is meant to cure a finding, and what a replay with it showed.

    Attributes:
        kind: What is changed.
        value: The change itself: module names for `fp32_modules`, a dtype name for `dtype`, a number for `init_scale`,
            GradScaler arguments for `scaler`, a step index for `skip_batch`, optimizer arguments for `optimizer`,
            a sentence for `code`.
        status: `verified` means: from the same snapshot and random state the failure comes back without the change, and
            with it the bad step and the next three are finite, not newly skipped, and agree with the fp32 reference.
        reason: Why the status is not `verified`, in a sentence; of a verified set of modules, if it is the smallest.
        detail: The change in a sentence, for people.
        alternatives: Other changes that were tried, in the order tried.
        proof: The replayed steps, where there was a replay.
    """

    kind: PrescriptionKind
    value: Any
    status: PrescriptionStatus
    reason: str | None = None
    detail: str = ""
    alternatives: tuple[Prescription, ...] = ()
    proof: Proof | None = field(default=None, metadata=UNWRITTEN)

    @classmethod
    def untried(cls, value: str, reason: str, detail: str | None = None) -> Prescription:
        """Returns a change of the user's own code, which no replay has tried."""
        return cls(kind="code", value=value, status="not_run", reason=reason, detail=detail or value)

    @property
    def verified(self) -> bool:
        """True only for status `verified`."""
        return self.status == "verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, with its place, its numbers and its cure.

    Attributes:
        code: Stable code ("AMP201").
        name: Stable kebab-case name ("forward-overflow").
        severity: error, warning or note.
        message: One sentence with the numbers that matter.
        cause: The cause from the ordered table ("forward_overflow"), where the finding has one.
        where: The address; of a finding about many tensors or modules, the one that shows it best.
        also: The others' addresses.
        evidence: The numbers behind the message, which ones depends on the code: JSON values, with units in the key
            names where they have one.
        help: What to do, in a sentence or two.
        prescription: The change, with the result of replaying it.
    """

    code: Annotated[str, form(pattern="^AMP[1-9][0-9]{2}$")]
    name: Annotated[str, form(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
    severity: Severity
    message: Text
    where: Where
    also: tuple[Annotated[Where, Shape(Place)], ...] = ()
    cause: Annotated[str, Shape(Cause)] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    help: str = ""
    prescription: Prescription | None = None

    @property
    def url(self) -> str:
        """The rule's page in the repository's documentation; `ampdoctor rule CODE` shows the same."""
        return f"docs/rules/{self.code}.md"

    @property
    def places(self) -> tuple[Where, ...]:
        """Every address that it is about, in the order of their names, whichever is the worst."""
        return tuple(sorted((self.where, *self.also), key=lambda w: (w.tensor or "", w.module, w.op or "")))

    @property
    def fingerprint(self) -> str:
        """Code, module, op and tensor in 16 hex digits; equal for the same finding in another run or step.

        For several places it is computed from what they have in common, so that one more of them does not change it.
        """
        if not self.also:
            return fingerprint_at(self.code, self.where)
        modules, ops = {place.module for place in self.places}, {place.op for place in self.places}
        role = self.evidence.get("role")
        common = Where(
            phase=self.where.phase,
            module=modules.pop() if len(modules) == 1 else f"several {role}" if isinstance(role, str) else "several",
            op=ops.pop() if len(ops) == 1 else None,
        )
        return fingerprint_at(self.code, common)


def fingerprint_at(code: str, where: Where) -> str:
    """The fingerprint of a rule's finding about one address alone."""
    key = "\0".join([code, where.module, where.op or "", where.tensor or ""])
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def with_files(finding: Finding, name: Callable[[str | None], str | None]) -> Finding:
    """The finding with another name for each of its files."""
    also = tuple(replace(where, file=name(where.file)) for where in finding.also)
    return replace(finding, where=replace(finding.where, file=name(finding.where.file)), also=also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """A finding that counts for no gate, because somebody has said so.

    Attributes:
        finding: What was found; it is as true as any other.
        by: `ignore`: an entry of the configuration, or `baseline`: it was known when the baseline was written.
        reason: The entry's own reason, or the baseline's file.
    """

    finding: Finding
    by: Literal["ignore", "baseline"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that was looked at, and how it went; a healthy report is a list of these.

    Attributes:
        name: What was checked ("finite gradients").
        result: `ok`, `found`, `not_run` or a short sentence.
        headroom: The tightest distance to a limit, in powers of two or as a fraction; {} where there is none.
    """

    name: Text
    result: Text
    headroom: Mapping[str, Any] = field(default_factory=dict)


SkippedKind = Literal["left_out", "unread", "other_weights", "lfs_pointer", "not_replayed", "not_in_half"]
"""`unread`: a tensor whose values may be anything; `other_weights`: a file of weights in a format that is not read;
`lfs_pointer`: a pointer of Git LFS lies in a file's place; `not_replayed`: the steps behind a failure that was set
aside, at which a search ended; `not_in_half`: a run that says fp16 or bf16 has computed in another format."""
STEPS_AFTER = "the steps after "
"""How the name of steps that were not replayed begins."""
NOT_IN_HALF = "the run in a half format"
"""The name of what was skipped if a run that says fp16 or bf16 computed in another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that was not examined, and why: a typed value, never a silent gap.

    Attributes:
        what: The file, tensor or part.
        reason: Why, a clause.
        kind: For what has to know it; a report has the words alone.
    """

    what: str
    reason: Text
    kind: SkippedKind = field(default="left_out", metadata=UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNote:
    """Something that could not be examined: it makes a report incomplete.

    Attributes:
        what: The file or part concerned.
        kind: Short stable word ("unreadable", "truncated").
        message: One sentence.
    """

    what: str
    kind: Text
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedEntry:
    """An entry of the baseline that was not found again.

    Attributes:
        fingerprint: As the finding's.
        code: As the finding's.
        severity: As the finding's.
        module: As in where.
        op: As in where.
        tensor: As in where.
        file: The checkpoint's file where several checkpoints were examined.
        message: As it was when the baseline was written.
    """

    fingerprint: str
    code: str
    severity: Severity
    module: str
    op: str | None
    tensor: str | None
    file: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSection:
    """What became of the findings of the baseline.

    Attributes:
        file: The baseline's file.
        written: Whether it was written from this report: then it knows all of it.
        new: How many findings are not in it.
        known: How many findings are in it.
        fixed: Its entries that were not found again.
    """

    file: str
    written: bool
    new: Count
    known: Count
    fixed: tuple[FixedEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What fails the command.

    Attributes:
        fail_on: Findings of this severity and worse fail it.
        exit_zero: Whether its exit code is 0 even so.
    """

    fail_on: Literal["error", "warning", "never"]
    exit_zero: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration file.

    Attributes:
        file: Its path from the working directory, or as the user named it.
    """

    file: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one command.

    Attributes:
        command: "scan", "bisect-nan", "profile", "recommend", "run" for a training that was watched,
            "health" for a run's log, or "plan" for a batch on another cluster.
        target: What was examined (path and format of a checkpoint, or the factory).
        run: How it was replayed (device, policy, precision, steps, replays, ...); {} for scan.
        verdict: sick, healthy, not_reproduced, inconclusive or not_judged.
        complete: False where something that should have been examined was not; `errors` says what.
        findings: Worst first.
        checks: What was looked at.
        skipped: What was left out on purpose.
        errors: What could not be examined.
        scaler: The loss-scaling section, where the command speaks of loss scaling.
        profile: The range section of profile and recommend.
        precision: Which precision the run and its modules should have, where the command speaks of it.
        health: What the logs of runs show over their steps.
        plan: A global batch on another cluster.
        trend: What a scan of several checkpoints of one training shows over their steps.
        change: What became of a checkpoint since an earlier one, where a scan was given both.
        structure: What lies in a checkpoint, where a scan was asked to list it.
        tensors: Each tensor that a scan has examined of the checkpoint that the report is about, in its order; None
            for a listing and for other commands.
        path: Of the first error of bisect-nan whose origin was traced: the way from the origin to the harm, or, of
            values that stay finite behind it, to where it ends; None where there is none.
        proof: The replayed steps without and with the change of the first finding that has such a replay, and in fp32;
            of recommend also where it proposes a scaler without a finding.
        suppressed: Findings that an ignore or the baseline has taken out of `findings`, in the same order.
        baseline: What became of the findings of the baseline, where one was given.
        gate: What fails the command, where a command line has decided that.
        thresholds: Those that the user has moved; all others have their defaults.
        configuration: The configuration file, where one has set something for the command: what fails the run, what is
            ignored and how grave a rule is may stand there.
        elsewhere: Of a folder of many checkpoints, what was found in each of the others that were read, for a baseline
            that is to know all of it; no report shows it.
    """

    command: Annotated[str, Shape(Command)]
    target: Annotated[Mapping[str, Any], Shape(Target)]
    verdict: Verdict
    run: Annotated[Mapping[str, Any], Shape(Run)] = field(default_factory=dict)
    complete: bool = True
    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    errors: tuple[ErrorNote, ...] = ()
    scaler: ScalerSection | None = None
    profile: Annotated[Mapping[str, Any], Shape(ProfileSection)] | None = None
    precision: PrecisionAdvice | None = None
    health: HealthSection | None = None
    plan: PlanSection | None = None
    trend: TrendSection | None = None
    change: ChangeSection | None = None
    structure: StructureSection | None = None
    tensors: Sequence[TensorRow] | None = None
    path: PathSection | None = None
    proof: ProofSection | None = None
    suppressed: tuple[Suppressed, ...] = ()
    baseline: BaselineSection | None = None
    gate: Gate | None = None
    thresholds: tuple[MovedThreshold, ...] = ()
    configuration: Configuration | None = None
    elsewhere: tuple[tuple[Finding, ...], ...] = field(default=(), metadata=UNWRITTEN)

    @property
    def is_not_compared(self) -> bool:
        """Whether no step of a run was held against fp32: what stays finite was not seen."""
        compared = any(check.headroom.get("steps") for check in self.checks if check.name == FP32_CHECK)
        return not compared and any(one.what == NOT_COMPARED for one in self.skipped)

    @property
    def found(self) -> tuple[Finding, ...]:
        """All findings, suppressed or not."""
        return (*self.findings, *(one.finding for one in self.suppressed))

    def worst(self) -> Severity | None:
        """The worst severity among the findings, or None."""
        return next((s for s in SEVERITIES if any(f.severity == s for f in self.findings)), None)

    def _repr_html_(self) -> str | None:
        """HTML for a notebook: verdict and findings."""
        return None if evidence.show_in_notebook is None else evidence.show_in_notebook(self)


def verdict_of(findings: Sequence[Finding], *, settled: bool = True, expect_failure: bool = False) -> Verdict:
    """Returns the verdict for all findings, suppressed ones included.

    `settled`: everything that a healthy verdict needs was examined. `expect_failure`: the user says that the run fails,
    so a replay that finds nothing has not reproduced it.
    """
    if any(finding.severity == "error" for finding in findings):
        return "sick"
    if expect_failure:
        return "not_reproduced"
    return "healthy" if settled else "inconclusive"


def finding_order(finding: Finding) -> tuple[int, int, str, str, str]:
    """Sort key of findings: worst first, then by step, code, module and tensor, so that two runs print the same."""
    where = finding.where
    step = -1 if where.step is None else where.step
    return SEVERITIES.index(finding.severity), step, finding.code, where.module, where.tensor or where.op or ""


# -- a report with the training's step numbers --

_SAID = re.compile(r"\b\w*(?:Error|Exception|Exit|Interrupt|Warning): [^;]*|\bstep (\d+)\b")
"""How sentences name a step; an exception that they quote, up to a semicolon, is the user's text."""


def renumber_steps(report: Report, first: int) -> Report:
    """Returns the report of a replay with the training's step numbers: the replay's step 0 becomes `first`.

    A recorded step has one number, its own; "step 0" of its replay means nothing to the user. Addresses, the target,
    the text of an exception, and any number beyond the replayed steps, which is no replay's, stay unchanged.
    """
    if first == 0:
        return report
    steps = report.run.get("steps")
    counting = _Counting(first, steps if type(steps) is int and steps > 0 else 1)
    counted: Report = counting.of(report)
    return counted


@dataclass(frozen=True, slots=True)
class _Counting:
    """Adds `first` to each of the replayed `steps` in a report."""

    first: int
    steps: int

    def of(self, value: Any, key: str = "", *, texts: bool = True) -> Any:
        """The value that stands under this key, with its steps renumbered; `texts`: in sentences too."""
        if type(value) is int:
            return value + self.first if key == "step" else value
        if isinstance(value, str):
            return _SAID.sub(self._said, value) if texts else value
        if isinstance(value, Mapping):
            return {name: self.of(item, name, texts=texts) for name, item in value.items()}
        if isinstance(value, tuple | list):
            inner = "step" if key == "steps" else ""
            return type(value)(self.of(item, inner, texts=texts) for item in value)
        if not is_dataclass(value) or isinstance(value, type | Source):
            return value
        apart = {"target", "global_step", "evidence"}
        names = [one.name for one in fields(value) if one.name not in apart]
        texts = texts and not isinstance(value, Where)
        made = {name: self.of(getattr(value, name), name, texts=texts) for name in names}
        if isinstance(value, Where):
            made["global_step"] = None  # the step itself shows it
        if isinstance(value, Finding):  # the evidence's own "step" may be a counter that was saved
            evidence = self.of(value.evidence, texts=False)
            made["evidence"] = evidence | {key: item for key, item in value.evidence.items() if key == "step"}
        return replace(value, **made)

    def _said(self, found: re.Match[str]) -> str:
        number = found[1]
        return found[0] if number is None or int(number) >= self.steps else f"step {int(number) + self.first}"
