"""The requests to the workflows: to replay a run, and to watch a training.

No torch here: the command line imports this file before it parses its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report, Suppressed
from ampdoctor.evidence.targets import DEFAULT_TARGET, FRAMEWORKS, Framework, target_named
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.sinks.export import Export
from ampdoctor.health.sinks.sink import Sink
from ampdoctor.workflows.output_files import is_run_log, refuse_of_log

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Policy = Literal["cuda", "native"]
HalfProducts = Literal["fp32", "plain"]

MOST_UNTIL_SICK = 2000
"""Default of `max_steps`: how many steps `until_sick` runs at most."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_OF_THE_RUN = (
    *("app_dir", "batches", "loss", "model", "allow_partial", "steps", "precision"),
    *("policy", "half_products", "device", "compare_steps", "fresh_scaler"),
    *("until_sick", "max_steps", "skip_batches"),
)
_OF_THE_ADVICE = ("emit", "target", "precision_matters")


def is_profile(target: str) -> bool:
    """Whether a target names a saved profile or a run's log rather than a factory, a script or a bundle."""
    path = Path(target)
    if path.name == "manifest.json":
        return False
    if path.is_dir():
        return is_run_log(target)
    if is_run_log(target) or path.suffix == ".py" or path.is_file():
        return path.suffix != ".py"
    if ":" in target or not path.suffix:
        return False
    from ampdoctor.replay.user_modules import dotted_factory  # here, because it imports torch and few targets get here

    return dotted_factory(target) is None


SetAside = Callable[[Report], Report]
"""Returns a report without the findings that the user has decided to ignore."""


def keep_all(report: Report) -> Report:
    """Set nothing aside."""
    return report


def suppress_all(report: Report) -> Report:
    """Set everything aside, so that a search finds all there is."""
    aside = (Suppressed(finding=finding, by="baseline", reason="") for finding in report.findings)
    return replace(report, findings=(), suppressed=(*report.suppressed, *aside))


class Progress(Protocol):
    """Called with a workflow's progress: the core never prints, and users of the library may show their own bar."""

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Report that `done` of `total` parts of `what` are finished.

        Args:
            what: The work in progress.
            done: Number of finished parts.
            total: Number of all parts; None if it is unknown.
            unit: "B" if the parts are bytes.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What to replay, and how.

    Attributes:
        factory: `package.module:function`, `path/to/file.py:function` or the function itself; a script that trains,
            `path/to/train.py`; or a bundle, `path/to/bundle-31000`; for `recommend` also the path of a profile.
        arguments: Keyword arguments of the factory.
        script_arguments: What follows the file in `sys.argv` while a script, or a factory, runs.
        checkpoint: Path of a checkpoint that is loaded before step 0, without running code from it.
        steps: Optimizer steps to replay; None: the command's usual number, or as many as there are batches.
        precision: Overrides the run's own precision.
        policy: The list of autocast ops that a CPU replay follows: CUDA's or the CPU's own. None: CUDA's, or for a
            bundle that of the device on which it was recorded.
        half_products: How a CPU multiplies fp16 under CUDA's policy: `fp32` kernels, rounded once as on tensor cores,
            or its own `plain` ones.
        device: `auto`, `cpu`, `cuda` or `cuda:<index>`.
        app_dir: Folder put first on the import path for the factory; None: the working directory.
        allow_partial: Accept a checkpoint that fits the model only in part.
        fresh_scaler: Use the loss scaler as the factory makes it, even if the checkpoint holds a scaler's state.
        batches: `module:name` of the batches, for a factory that returns a bare `nn.Module`.
        loss: `module:name` of the loss function `(model, batch) -> loss`, for the same factories.
        model: What makes a bundle's model: `train.py:make_model`, `model.py:GPT`, or a file alone.
        compare_steps: How many steps of a run that stays finite `bisect-nan` compares with fp32; None for all.
        until_sick: `bisect-nan` runs until a step is non-finite, with only the cheap check on each step.
        max_steps: Optimizer steps that `until_sick` runs at most; None for `MOST_UNTIL_SICK`.
        skip_batches: Micro-batches to skip before step 0; "checkpoint": as many as the checkpoint's steps used. None:
            "checkpoint" with `until_sick`, else 0. A function of batches that takes `start` gets the number of steps.
        expect_failure: The user says that the run fails: a replay that stays finite is then `not_reproduced`.
        spill: Keep the states before steps in an unnamed temporary file instead of in memory.
        thresholds: Limits of the rules; see `diagnosis.catalogue.thresholds_from`.
        emit: Framework for which `recommend` writes the settings; its scaler's rules are simulated, too.
        target: The hardware that a precision is recommended for, a name of `evidence.targets.TARGETS`.
        precision_matters: The user needs more than bf16's 8 bits.
        shown: Filled by replays: the parts of the run whose output was shown, which is done once.

    Raises:
        UsageError: An option has none of the values above, or two options contradict each other.
    """

    factory: str | Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    script_arguments: tuple[str, ...] = ()
    checkpoint: str | None = None
    steps: int | None = None
    precision: Precision | None = None
    policy: Policy | None = None
    half_products: HalfProducts = "fp32"
    device: str = "auto"
    app_dir: str | None = None
    allow_partial: bool = False
    fresh_scaler: bool = False
    batches: str | None = None
    loss: str | None = None
    model: str | None = None
    compare_steps: int | None = None
    until_sick: bool = False
    max_steps: int | None = None
    skip_batches: int | Literal["checkpoint"] | None = None
    expect_failure: bool = False
    spill: bool = False
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    emit: Framework | None = None
    target: str = DEFAULT_TARGET
    precision_matters: bool = False
    shown: set[object] = field(default_factory=set, compare=False, repr=False)

    @property
    def framework(self) -> Framework:
        """The framework whose scaler is simulated."""
        return self.emit or "torch"

    def described(self, factory: str) -> dict[str, Any]:
        """Returns the report's `target`: the factory's name, and the options that differ from their defaults."""
        arguments = [_typed(name, value) for name, value in self.arguments.items()]
        named = {"--arg": arguments} if arguments and None not in arguments else {}
        options = {**named, **self._options(_OF_THE_RUN)}
        more = {"options": options, "arguments": list(self.script_arguments)}
        return {"factory": factory, "checkpoint": self.checkpoint, **{key: said for key, said in more.items() if said}}

    def described_advice(self) -> dict[str, Any]:
        """Returns the options that only advice adds to `target`."""
        options = self._options(_OF_THE_ADVICE)
        return {"advice_options": options} if options else {}

    def _options(self, names: Iterable[str]) -> dict[str, Any]:
        usual = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        given = {name: getattr(self, name) for name in names if getattr(self, name) != usual[name]}
        plain = given.pop("half_products", None)
        knobs = {} if plain is None else {"--threshold": [f"half-products={plain}"]}
        options = {f"--{key.replace('_', '-')}": [] if said is True else [str(said)] for key, said in given.items()}
        return {**options, **knobs}

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps is {self.steps}: a replay needs at least one step")
        if self.compare_steps is not None and self.compare_steps < 0:
            raise UsageError(f"compare_steps is {self.compare_steps}: it counts from 0, which compares nothing")
        self._check_until_sick()
        forms = {"precision": Precision, "policy": Policy, "half_products": HalfProducts}
        for name, known in {**{key: get_args(form) for key, form in forms.items()}, "emit": FRAMEWORKS}.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(f"{name} {value!r} is none of {', '.join(known)}")
        target_named(self.target)
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"device {self.device!r} is none of auto, cpu, cuda, cuda:<index>")

    def _check_until_sick(self) -> None:
        if self.until_sick and self.steps is not None:
            raise UsageError(
                f"--until-sick runs on for --max-steps, and --steps {self.steps} says another number: give one of them"
            )
        if self.max_steps is not None and not self.until_sick:
            raise UsageError("--max-steps bounds --until-sick: without that it is --steps")
        if self.max_steps is not None and self.max_steps < 1:
            raise UsageError(f"max_steps is {self.max_steps}: a replay needs at least one step")
        if isinstance(self.skip_batches, int) and self.skip_batches < 0:
            raise UsageError(f"skip_batches is {self.skip_batches}: it counts from 0, which passes over nothing")
        if self.skip_batches == "checkpoint" and self.checkpoint is None:
            raise UsageError("--skip-batches checkpoint passes over what a checkpoint's steps took: give --checkpoint")


def _typed(name: str, value: Any) -> str | None:
    try:
        return f"{name}={json.dumps(value, allow_nan=False)}"
    except (TypeError, ValueError):
        return None


# -- watch --

OnSick = Literal["record", "stop"]
Look = Literal["auto", "sync", "off"]

USUAL_EVERY = 100
"""Steps from one close measurement to the next."""
USUAL_BUNDLE_BYTES = 4_000_000_000
"""Maximum size of a bundle."""
USUAL_PROBATION = 100
"""Accepted steps after which a finite checkpoint is good."""
USUAL_GOOD_BYTES = 20_000_000_000
"""Maximum size of all copies of checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """What to watch, and what to do when a step is sick.

    Attributes:
        health: Absolute path of the folder for the log and the bundles; it need not exist yet.
        named: The same path as the user typed it, for messages; "" for `health`.
        script: What trains: a script's path or a module's name, as the user typed it.
        is_module: `script` is a module's name.
        arguments: What follows `script` in `sys.argv`.
        command: The whole command line without the interpreter's own options.
        every: Steps from one close measurement to the next.
        on_sick: `record`: diagnose, log, keep a bundle, and let the training continue. `stop`: the same, then raise
            `errors.StoppedError` into the loop.
        look: `auto`: check before the update wherever that does not synchronise the device. `sync`: everywhere, with
            one synchronisation a step. `off`: never replay a step.
        guard: Let a fused optimizer hold a sick update back on the device.
        bundle: Keep a bundle of the first sick step.
        bundle_max: Maximum bytes of a bundle, and of what `record_batches` keeps for one.
        record_batches: Number of last updates whose batches are kept, for a sick step that is known only after its
            update; 0 for none.
        export: Where the log's numbers and alerts are sent while the training runs.
        checkpoints: Folder that the training saves to: its last good checkpoints are kept in `health`. None: none are.
        probation: Accepted steps without a sick one after which a finite checkpoint is good.
        good_max: Maximum bytes of copies of checkpoints; most are links, which take none.
        thresholds: Limits of the rules.
        test: A test is watched: its parts live until its end, and what each update leaves is looked at, which takes a
            copy of the weights and of the optimizer's state.
        most_skipped: Steps that scalers may skip in all; None: as many as it takes to settle.

    Raises:
        UsageError: A number is too small, `on_sick` or `look` has none of these values, or an export would overwrite
            the log.
    """

    health: str
    named: str = ""
    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    every: int = USUAL_EVERY
    on_sick: OnSick = "record"
    look: Look = "auto"
    guard: bool = False
    bundle: bool = True
    bundle_max: int = USUAL_BUNDLE_BYTES
    record_batches: int = 0
    export: tuple[Export | Sink, ...] = ()
    checkpoints: str | None = None
    probation: int = USUAL_PROBATION
    good_max: int = USUAL_GOOD_BYTES
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    test: bool = False
    most_skipped: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"every is {self.every}: a measurement comes each step at most")
        if self.on_sick not in get_args(OnSick):
            raise UsageError(f"on_sick {self.on_sick!r} is neither record nor stop")
        if self.look not in get_args(Look):
            raise UsageError(f"look {self.look!r} is none of auto, sync, off")
        if self.on_sick == "stop" and self.look == "off":
            raise UsageError("on_sick stop ends the training after a look, and look off never looks: give one of them")
        self._check_amounts()
        for one in self.export:
            for file in one.files(Path(self.health).name) if isinstance(one, Export) else ():
                refuse_of_log(file, self.health)

    def _check_amounts(self) -> None:
        if self.bundle_max < 1:
            raise UsageError(f"bundle_max is {self.bundle_max} bytes: a bundle that takes nothing is bundle=False")
        if self.record_batches < 0:
            raise UsageError(f"record_batches is {self.record_batches}: it counts updates, and 0 keeps none")
        if self.probation < 1:
            raise UsageError(f"probation is {self.probation}: a checkpoint takes one clean step at least to be good")
        if self.good_max < 0:
            raise UsageError(f"good_max is {self.good_max} bytes: 0 keeps links alone")
        if self.checkpoints is not None and Path(self.checkpoints).is_file():
            raise UsageError(f"checkpoints is {self.checkpoints}, a file: name the folder that the training saves to")
