"""Judges a run step by step with all rules on steps and on tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal

from ampdoctor.diagnosis.catalogue import FINDERS, rules
from ampdoctor.diagnosis.health.rolling import RECENT
from ampdoctor.diagnosis.health.step_state import EPISODE, StepState
from ampdoctor.diagnosis.health.tensor_state import TensorCourses, TensorState
from ampdoctor.evidence.log_records import DetailLine, EndLine, Line, LookLine, RunLine, StepLine
from ampdoctor.evidence.report import SEVERITIES, Finding
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds

# -- the finding of a rule on steps or tensors --


First = Literal["data", "loss", "both", "forward", "gradient", "optimizer", "scale", "logits", "weights", "hardware"]
"""What moved first; `both` are the loss and the gradient norm in one step."""
TENSOR = "{tensor}"  # placeholder for the worst tensor's name in a rule's message


def ahead(steps: float) -> str:
    """Formats a forecast in steps, with two digits."""
    if not math.isfinite(steps) or steps < 1:
        return "at once"
    digits = max(0, int(math.log10(steps)) - 1)
    return f"in about {int(round(steps, -digits)):,} steps"


_ROOT = 16  # optimizers that are judged; further ones are not
_DEPARTS = {"data": "batch", "forward": "forward", "loss": "forward"}
"""What departs where the diagnosis of a step found a non-finite number in a phase."""

_Find = Callable[[Any, Thresholds], Iterable[Finding]]


@dataclass(slots=True)
class _Told:
    """An episode of findings of one rule."""

    severity: str
    step: int
    of_tensors: bool
    lines: int  # lines of its kind and optimizer up to the last at which the rule found it
    keys: list[tuple[str | None, int | None]] = field(default_factory=list)  # tensor and step of each finding


_LASTS: Mapping[str, Callable[[StepState], bool]] = MappingProxyType(
    {
        "AMP721": lambda moment: moment.spike is not None,
        "AMP722": lambda moment: moment.ill.stand,
        "AMP740": lambda moment: moment.scale.in_a_row > 0,
        "AMP741": lambda moment: not moment.loss.recent <= moment.first_losses.first,
        "AMP742": lambda moment: moment.scale.wrong is not None,
    }
)
"""Whether what such a rule found once lasts at a step. Any other rule finds it again at each line while it lasts."""


class Judge:
    """Judges a run while it goes on, or its log afterwards: the same lines give the same findings.

    It is causal: its findings after a line depend on that line and those before. It keeps a few hundred numbers a
    tensor, independent of the length of the run.
    """

    def __init__(self, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> None:
        rules()
        self._thresholds = thresholds
        self._on_steps, self._on_tensors = _finders(StepState), _finders(TensorState)
        self._names: tuple[str, ...] = ()
        self._optimizers: tuple[str, ...] = ()
        self._groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
        self._steps: dict[int, StepState] = {}
        self._tensors: dict[int, TensorCourses] = {}
        self._told: dict[tuple[str, str | None, int], _Told] = {}
        self._lines: Counter[tuple[int, bool]] = Counter()  # lines, by optimizer, and whether they are of tensors
        self._looked_at: int | None = None

    def add(self, line: Line) -> tuple[Finding, ...]:
        """Takes a line and returns the new findings, worst first; none for most lines."""
        if isinstance(line, StepLine):
            return self._add_step(line)
        if isinstance(line, DetailLine):
            return self._add_detail(line)
        if isinstance(line, RunLine):
            self._names, self._optimizers, self._groups = line.tensors, line.optimizers, line.groups
        elif isinstance(line, LookLine):
            self._looked_at = line.step
            self.knows(line)
        elif isinstance(line, EndLine):
            return self.ends(line)
        return ()

    def ends(self, end: EndLine | None = None) -> tuple[Finding, ...]:
        """Returns the findings on the last steps of a finished log, once; `end` is None where the log just stops."""
        new: list[Finding] = []
        for optimizer, moment in self._steps.items():
            if moment.end is None:
                moment.ends(end or EndLine())
                found = [one for find in self._on_steps for one in find(moment, self._thresholds)]
                new += self._new(found, optimizer, moment.line.step)
        return tuple(sorted(new, key=lambda one: SEVERITIES.index(one.severity)))

    def is_over(self, finding: Finding) -> bool:
        """Returns whether the run has come back from what was found, by the last line."""
        key = (finding.where.tensor, finding.where.step)
        return not any(
            code == finding.code and key in told.keys and self._lasts(code, optimizer, told)
            for (code, _, optimizer), told in self._told.items()
        )

    def _lasts(self, code: str, optimizer: int, told: _Told) -> bool:
        if code in _LASTS and optimizer in self._steps:
            return _LASTS[code](self._steps[optimizer])
        return self._lines[optimizer, told.of_tensors] - told.lines < (2 if told.of_tensors else RECENT)

    def resumes(self) -> None:
        """Continues with a new process, whose steps are numbered anew; what was usual stays."""
        for moment in self._steps.values():
            moment.resumes()
        self._tensors.clear()  # the new process numbers names anew, and looks are rare
        self._told.clear()
        self._looked_at = None

    def _add_step(self, line: StepLine) -> tuple[Finding, ...]:
        moment = self._steps.get(line.optimizer)
        if moment is None and len(self._steps) >= _ROOT:
            return ()
        if moment is None:
            moment = self._steps[line.optimizer] = StepState()
        elif line.step <= moment.line.step:  # a rollback, or another run: earlier lines are not its past
            moment = self._steps[line.optimizer] = StepState()
            self._tensors.pop(line.optimizer, None)
        moment.alone = len(self._steps) == 1
        moment.groups = self._groups[line.optimizer] if line.optimizer < len(self._groups) else ()
        moment.add(line)
        if moment.departed.get("schedule") == line.step:  # one optimizer's jump changes what the others see
            for other in self._steps.values():
                other.departs("schedule")
        if moment.batch.size.changed:  # weights grow at another pace with another batch size
            self._tensors.pop(line.optimizer, None)
        self._lines[line.optimizer, False] += 1
        found: list[Finding] = []
        for find in self._on_steps:
            if new := find(moment, self._thresholds):
                found += new
        return self._new(found, line.optimizer, line.step) if found else ()

    def knows(self, line: LookLine) -> None:
        """Records what the diagnosis of a step found as a candidate for what moved first."""
        for one in line.findings:
            told = _Told(one.severity, line.step, False, self._lines[0, False])
            told.keys.append((one.where.tensor, line.step))
            self._told[one.code, one.where.tensor, 0] = told
        born = {one.where.phase for one in line.findings if one.where.nonfinite != "none"}
        for what in {_DEPARTS[phase] for phase in born & _DEPARTS.keys()}:
            for moment in self._steps.values():
                moment.departs(what, line.step)

    def _add_detail(self, line: DetailLine) -> tuple[Finding, ...]:
        if line.reason != "sampled":  # the extra looks after a finding are not evenly spaced
            return ()
        courses = self._tensors.setdefault(line.optimizer, TensorCourses())
        if courses.moment.seen and line.step < courses.moment.line.step:  # a step's details come before its own line
            courses = self._tensors[line.optimizer] = TensorCourses()
        self._lines[line.optimizer, True] += 1
        courses.add(line)
        courses.moment.names, courses.moment.of_steps = self._names, self._steps.get(line.optimizer)
        found: list[Finding] = []
        for find in self._on_tensors:
            found += find(courses.moment, self._thresholds)
        if any(one.evidence["first"] == "logits" and one.severity == "warning" for one in found):
            for moment in self._steps.values():
                moment.drifts(line.step)
        return self._new(found, line.optimizer, line.step, of_tensors=True) if found else ()

    def _named(self, finding: Finding) -> Finding:
        """Returns the finding with the names of its tensors: a rule only has their numbers."""
        if finding.where.tensor is None:
            return replace(finding, message=finding.message.replace(TENSOR, "the model"))
        where, *also = (
            replace(place, tensor=name, module=(name or "").rpartition(".")[0])
            for place in (finding.where, *finding.also)
            for name in [self._name(place.tensor)]
        )
        told = replace(finding, where=where, also=tuple(also))
        return replace(told, message=told.message.replace(TENSOR, where.tensor or "the model"))

    def _name(self, index: str | None) -> str | None:
        if index is None:
            return None
        number = int(index)
        return self._names[number] if number < len(self._names) else f"tensor {number}"

    def _new(
        self, found: Sequence[Finding], optimizer: int, step: int, *, of_tensors: bool = False
    ) -> tuple[Finding, ...]:
        """Returns the findings that were not reported before, or are more severe now."""
        new, lines = [], self._lines[optimizer, of_tensors]
        for finding in map(self._named, found):
            key = (finding.code, finding.where.tensor, optimizer)
            told = self._told.get(key)
            if told is not None and step - told.step < EPISODE:
                graver = SEVERITIES.index(finding.severity) < SEVERITIES.index(told.severity)
                told.step, told.lines = step, lines
                if not graver and not finding.evidence.get("ended"):
                    continue
                told.severity = finding.severity
            else:
                told = self._told[key] = _Told(finding.severity, step, of_tensors, lines)
            told.keys.append((finding.where.tensor, finding.where.step))
            if step == self._looked_at:  # the step's own diagnosis, with op and line, is more detailed
                continue
            new.append(self._of(finding, optimizer))
        return tuple(sorted(new, key=lambda one: SEVERITIES.index(one.severity)))

    def _of(self, finding: Finding, optimizer: int) -> Finding:
        """Adds the optimizer's name, where there are several."""
        if len(self._steps) < 2:
            return finding
        name = self._optimizers[optimizer] if optimizer < len(self._optimizers) else str(optimizer)
        return replace(finding, evidence={**finding.evidence, "optimizer": name})


def _finders(evidence: type) -> list[_Find]:
    return [find for _, find in sorted(FINDERS.get(evidence, ()), key=itemgetter(0))]
