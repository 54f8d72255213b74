"""Rules on a checkpoint's tensors: impossible values; and helpers of findings on tensors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from ampdoctor.diagnosis.catalogue import SCANNED, Finder, Rule, figure, not_replayed, rule, short
from ampdoctor.diagnosis.health.loss_rules import STEPS_NOT_FINITE
from ampdoctor.evidence.checkpoint_stats import (
    CastLoss,
    CheckpointSummary,
    IndexSummary,
    LostNumbers,
    TensorChange,
    TensorRole,
    TensorSummary,
    ZeroSecondMoment,
)
from ampdoctor.evidence.location import NonFinite, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds

MAX_LISTED = 20  # tensors that a finding's evidence lists
MAX_FINDINGS = 20  # findings that one rule lists one by one: a checkpoint that is NaN everywhere would fill pages
FP16_MAX = 65504.0  # fp16's largest finite number
SMALLEST_MASK_FILL = 1e4
"""A tensor of zeros and one other magnitude from here on is taken for an additive mask; GPT-2 uses -1e4."""
_ROLE_WORDS = {
    "weight": "weights", "buffer": "buffers", "ema": "averaged weights", "moment": "moments", "scaler": "scalers",
    "other": "tensors",
}  # fmt: skip
FP16_FLUSH_AT = 2.0**-25  # magnitude up to which a number becomes zero in fp16

ERROR: Callable[[Sequence[TensorSummary]], Severity] = lambda _: "error"  # noqa: E731
WARNING: Callable[[Sequence[TensorSummary]], Severity] = lambda _: "warning"  # noqa: E731

Tensor: TypeAlias = TensorSummary | IndexSummary | TensorChange | ZeroSecondMoment
Part = TypeVar("Part")
Judged: TypeAlias = Callable[[CheckpointSummary, Part, Thresholds], Iterator[Finding]]
JudgesAll: TypeAlias = Finder[CheckpointSummary]


def for_each(parts: Callable[[CheckpointSummary], Iterable[Part]]) -> Callable[[Judged[Part]], JudgesAll]:
    """Returns a decorator that makes a rule on one part of a checkpoint a rule on all of them."""

    def decorated(find: Judged[Part]) -> JudgesAll:
        @functools.wraps(find)
        def judged(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
            for part in parts(summary):
                yield from find(summary, part, thresholds)

        return judged

    return decorated


def address(tensor: Tensor) -> str:
    """Returns a tensor's name with its group in front ("ema.fc.weight")."""
    return f"{tensor.group}.{tensor.name}" if tensor.group else tensor.name


def where_of(tensor: Tensor, step: int | None = None, *, nonfinite: bool = False) -> Where:
    """Returns a tensor's address, in the checkpoint of that global step; `nonfinite`: it is about its NaN or Inf."""
    sick: NonFinite = "nan" if isinstance(tensor, TensorSummary) and tensor.nan else "inf"
    return Where(
        phase="checkpoint",
        global_step=step,
        module=tensor.module,
        op=op_of(tensor),
        nonfinite=sick if nonfinite else "none",
        tensor=address(tensor),
        file=tensor.file or None,
    )


def also_of(shown: Tensor, among: Iterable[Tensor]) -> tuple[Where, ...]:
    """Returns the addresses of the tensors that `shown` represents in a finding."""
    return tuple(where_of(tensor) for tensor in among if tensor is not shown)


def listed(tensors: Sequence[TensorSummary]) -> list[str]:
    """Returns the names, as many as a finding's evidence lists."""
    return [address(tensor) for tensor in tensors[:MAX_LISTED]]


def is_mask(tensor: TensorSummary) -> bool:
    """Returns whether a tensor looks like an additive attention mask: zeros and one large value, or -Inf."""
    if tensor.nan or tensor.pos_infs or tensor.role == "moment":
        return False
    if tensor.zeros == 0 and tensor.role != "buffer":
        return False
    if tensor.neg_infs:
        return tensor.amax is None
    return tensor.amax is not None and tensor.amax == tensor.amin and tensor.amax >= SMALLEST_MASK_FILL


def each_tensor(
    summary: CheckpointSummary,
    rule: Rule,
    tensors: Sequence[TensorSummary],
    said: Callable[[TensorSummary], str],
    are: str,
    *,
    severity: Callable[[Sequence[TensorSummary]], Severity],
    more: Callable[[TensorSummary], Mapping[str, Any]] = lambda _: {},
    nonfinite: bool = False,
    cause: str | None = "bad_checkpoint",
    prescribe: Callable[[TensorSummary], Prescription | None] = lambda _: None,
) -> Iterator[Finding]:
    """Yields a finding for each tensor (`said`), and one for all beyond `MAX_FINDINGS`, which `are` so."""
    for tensor in tensors[:MAX_FINDINGS]:
        yield rule.finding(
            severity([tensor]),
            said(tensor),
            where=where_of(tensor, summary.global_step, nonfinite=nonfinite),
            cause=cause,
            evidence={**numbers(tensor), **more(tensor)},
            prescription=prescribe(tensor),
        )
    rest = tensors[MAX_FINDINGS:]
    if not rest:
        return
    first, alike = rest[0], sum(t.role == rest[0].role for t in summary.tensors)
    of_all = f"{len(tensors):,} of {alike:,} in all"
    message = f"{len(rest):,} more {_ROLE_WORDS[first.role]} {are}, {label(first)} first: {of_all}."
    evidence = {"role": first.role, "tensors": len(tensors), "listed": [address(t) for t in rest[:MAX_LISTED]]}
    yield rule.finding(
        severity(rest),
        message,
        where=where_of(first, summary.global_step, nonfinite=nonfinite),
        also=also_of(first, rest),
        cause=cause,
        evidence=evidence,
        prescription=prescribe(first),
    )


def castable(summary: CheckpointSummary) -> list[list[TensorSummary]]:
    """Returns the tensors that a user may cast, by role."""
    roles = ("weight", "buffer", "ema")
    return [[t for t in summary.tensors if t.role == role and not is_mask(t)] for role in roles]


def op_of(tensor: Tensor) -> str:
    """Returns the kind of a tensor as in a finding's address ("state:weight", "optimizer_state:exp_avg")."""
    if isinstance(tensor, IndexSummary):
        return f"state:{tensor.entry}"
    role = "moment" if isinstance(tensor, ZeroSecondMoment) else tensor.role
    in_optimizer = role == "moment" or (role == "other" and tensor.entry == "step")
    return f"{'optimizer_state' if in_optimizer else 'state'}:{tensor.entry}"


def label(tensor: TensorSummary) -> str:
    """Formats a tensor."""
    return f"{tensor.entry} of {address(tensor)}" if op_of(tensor).startswith("optimizer_state") else address(tensor)


def numbers(tensor: TensorSummary) -> dict[str, Any]:
    """Returns a tensor's figures as JSON values."""
    return {
        "role": tensor.role,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "examined": tensor.examined,
        "nans": tensor.nan,
        "pos_infs": tensor.pos_infs,
        "neg_infs": tensor.neg_infs,
        "amax": tensor.amax,
    }


def cast_row(tensor: TensorSummary, name: str) -> dict[str, Any]:
    """Returns the effect of a cast to a format as JSON values."""
    loss = next((loss for loss in tensor.casts if loss.format == name), None)
    row: dict[str, Any] = {"tensor": address(tensor), "dtype": tensor.dtype, "amax": tensor.amax}
    if tensor.counted < tensor.examined:
        row |= {"counted": tensor.counted, "examined": tensor.examined}
    return row if loss is None else row | losses(loss)


def losses(cast: CastLoss) -> dict[str, float]:
    """Returns the shares and the error of a cast as JSON values."""
    return {
        "flushed": cast.flushed,
        "subnormal": cast.subnormal,
        "overflowed": cast.overflowed,
        "relative_error": cast.relative_error,
    }


def count_of(tensors: Sequence[TensorSummary], verb: str = " hold") -> str:
    """Formats their number, as the subject of a sentence."""
    words = _ROLE_WORDS[tensors[0].role]
    if len(tensors) == 1:
        return f"1 {words.removesuffix('s')}{verb and verb + 's'}"
    return f"{len(tensors):,} {words}{verb}"


def percent(share: float) -> str:
    """Formats a share."""
    return f"{100 * share:.3g} %"


BEYOND_FP16 = rule("AMP104", SCANNED)

FP16_OVERFLOW_AT = 65520.0  # halfway between `FP16_MAX` and 65536: from here on, rounding to nearest gives Inf


@BEYOND_FP16.judges(CheckpointSummary)
def _beyond_fp16(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for tensors in castable(summary):
        beyond = [t for t in tensors if t.amax is not None and t.amax >= FP16_OVERFLOW_AT]
        if not beyond:
            continue
        worst = max(beyond, key=lambda t: t.amax or 0.0)
        cast = any(t.role == "weight" and len(t.shape) >= 2 and t.dtype in {"float32", "float64"} for t in beyond)
        yield BEYOND_FP16.finding(
            "warning" if cast else "note",
            f"{count_of(beyond)} values above fp16's largest value, 65,504: up to {figure(worst.amax or 0.0)} in "
            f"{label(worst)}. A cast to fp16 makes them Inf.",
            where=where_of(worst, summary.global_step),
            also=also_of(worst, beyond),
            evidence={
                "role": worst.role,
                "amax": worst.amax,
                "limit": FP16_MAX,
                "tensors": len(beyond),
                "listed": [cast_row(t, "fp16") for t in beyond[:MAX_LISTED]],
            },
        )


AVERAGE_THROUGH_HALF = rule("AMP114", (*SCANNED, "bisect-nan", "run"))


BEYOND_FP16_SAID = (
    "{name} of the model is finite and reaches {amax}, above fp16's largest value, 65,504: the copy was cast to fp16"
)
"""How it shows that an average went through fp16."""


def cast_averages(summary: CheckpointSummary) -> dict[str, tuple[TensorSummary, TensorSummary]]:
    """Returns averages that went through fp16, with the model's tensors: Inf where those are finite beyond fp16."""
    averages = [t for t in summary.tensors if t.role == "ema" and t.inf and not t.nan]
    if not averages:
        return {}
    own = {_bare(t.name): t for t in summary.tensors if t.role in {"weight", "buffer"}}
    pairs = ((t, _twin(t, own)) for t in averages)
    return {
        address(t): (t, twin)
        for t, twin in pairs
        if twin is not None and not twin.nonfinite and twin.amax is not None and twin.amax >= FP16_OVERFLOW_AT
    }


def _twin(average: TensorSummary, own: Mapping[str, TensorSummary]) -> TensorSummary | None:
    """Returns the model's tensor of an averaged copy: the same name, with or without prefixes (`ema.`, `module.`)."""
    rest = average.name
    while rest:
        twin = own.get(_bare(rest))
        if twin is not None and twin.shape == average.shape:
            return twin
        rest = rest.partition(".")[2]
    return None


def _bare(name: str) -> str:
    return name.removeprefix("module.").replace(".", "")  # the average of Stable Diffusion has no dots


@AVERAGE_THROUGH_HALF.judges(CheckpointSummary)
def _through_half(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    pairs = cast_averages(summary)

    def said(average: TensorSummary) -> str:
        twin = pairs[address(average)][1]
        beyond = BEYOND_FP16_SAID.format(name=label(twin), amax=figure(twin.amax or 0.0))
        return f"{label(average)}, an averaged copy, holds {average.inf:,} Inf. {beyond}."

    def more(average: TensorSummary) -> dict[str, Any]:
        twin = pairs[address(average)][1]
        return {"model": address(twin), "model_amax": twin.amax, "limit": FP16_MAX}

    averages = [average for average, _ in pairs.values()]
    yield from each_tensor(
        summary, AVERAGE_THROUGH_HALF, averages, said, "went through fp16", severity=ERROR, more=more, nonfinite=True
    )


# -- non-finite numbers outside of tensors: names tell which are training losses --


_WORD = re.compile(r"[a-z]+")
_OF_TRAINING = frozenset(
    {
        "loss", "losses", "train", "training", "total", "avg", "average", "mean", "epoch", "running", "cur", "current",
        "last", "prev", "step", "batch", "iter", "history", "log", "logs", "sum", "smoothed", "ema", "value",
    }
)  # fmt: skip
"""Words of a training loss's name: `train_loss`, `running_loss`; but not of `loss_scale` and `val_loss`."""
_HELD_OUT = frozenset({"val", "valid", "validation", "dev", "eval", "evaluation", "test", "best", "min", "lowest"})


def is_training_loss(lost: LostNumbers) -> bool:
    """Returns whether these are losses of the training, by name, and the last is NaN, or Inf under a plain name."""
    *above, name = re.split(r"[./]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", lost.name)) or [""]
    if name.isdigit() and above:
        name = above.pop()
    words = set(_WORD.findall(name.lower()))
    around = {word for part in above for word in _WORD.findall(part.lower())}
    if not words & {"loss", "losses"} or not words <= _OF_TRAINING or around & _HELD_OUT:
        return False
    return math.isnan(lost.last) or (math.isinf(lost.last) and not words & {"last", "prev"})


# AMP101 to AMP103 and AMP108


@STEPS_NOT_FINITE.judges(CheckpointSummary)
def _stored_losses(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    """Judges a training loss that was saved with the weights; where there is a log, it is the log that counts."""
    step = summary.global_step
    if summary.log is None and summary.loss is not None and not math.isfinite(summary.loss):
        kind: NonFinite = "inf" if math.isinf(summary.loss) else "nan"
        yield STEPS_NOT_FINITE.finding(
            "error",
            f"The loss saved with the weights is {summary.loss:g}.",
            where=Where(phase="loss", global_step=step, nonfinite=kind),
            evidence={"loss": summary.loss},
        )
    for lost in filter(is_training_loss, summary.lost):
        many = f"The last of {lost.count} losses in " if lost.count > 1 else "The loss "
        yield STEPS_NOT_FINITE.finding(
            "error",
            f"{many}{lost.name} is {lost.last:g}.",
            where=Where(
                phase="loss",
                global_step=step,
                op="number",
                nonfinite="inf" if math.isinf(lost.last) else "nan",
                tensor=lost.name,
                file=lost.file or None,
            ),
            evidence={"entries": lost.count, "lost": lost.nans + lost.infs},
        )


NON_FINITE_WEIGHT = rule("AMP101", SCANNED, ruins_checkpoint=True)
NON_FINITE_BUFFER = rule("AMP102", SCANNED, ruins_checkpoint=True)
NON_FINITE_OPTIMIZER_STATE = rule("AMP103", SCANNED, ruins_checkpoint=True)
NON_FINITE_TENSOR = rule("AMP108", SCANNED, ruins_checkpoint=True)


@NON_FINITE_WEIGHT.judges(CheckpointSummary)
def _weights(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    cast = cast_averages(summary)  # AMP114 reports these
    for role in ("weight", "ema"):
        sick = [t for t in _sick(summary, role) if address(t) not in cast]
        yield from _not_finite(summary, NON_FINITE_WEIGHT, sick)


@NON_FINITE_BUFFER.judges(CheckpointSummary)
def _buffers(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    yield from _not_finite(summary, NON_FINITE_BUFFER, _sick(summary, "buffer"))


@NON_FINITE_OPTIMIZER_STATE.judges(CheckpointSummary)
def _optimizer_state(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    states = [
        t for t in summary.tensors if t.nonfinite and (t.role == "moment" or (t.role == "other" and t.entry == "step"))
    ]
    yield from _not_finite(summary, NON_FINITE_OPTIMIZER_STATE, states, prescribe=_without)


@NON_FINITE_TENSOR.judges(CheckpointSummary)
def _others(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    loose = [
        t
        for t in summary.tensors
        if t.role == "other" and t.entry != "step" and (t.examined > 1 or t.nan) and t.nonfinite and not is_mask(t)
    ]
    yield from _not_finite(summary, NON_FINITE_TENSOR, loose, severity=WARNING, cause=None)


@NON_FINITE_TENSOR.judges(CheckpointSummary)
def _numbers(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    told = [one for one in summary.lost if one.nans and not is_training_loss(one)]
    graded: tuple[tuple[Severity, bool], ...] = (("warning", True), ("note", False))
    for severity, at_the_end in graded:
        lost = [one for one in told if math.isnan(one.last) is at_the_end]
        if lost:
            yield _number_finding(summary, lost, severity)


def _sick(summary: CheckpointSummary, role: TensorRole) -> list[TensorSummary]:
    return [t for t in summary.tensors if t.role == role and t.nonfinite and not _benign_buffer(t)]


def _benign_buffer(tensor: TensorSummary) -> bool:
    """Whether it is -Inf in a mask, or an observer of quantisation before its first batch."""
    if tensor.nan:
        return False
    if tensor.entry.startswith(("min_val", "max_val")):
        return tensor.inf == tensor.examined
    return is_mask(tensor) or (tensor.entry.endswith(("mask", "masked_bias", "alibi")) and not tensor.pos_infs)


def _not_finite(
    summary: CheckpointSummary,
    rule: Rule,
    tensors: Sequence[TensorSummary],
    *,
    severity: Callable[[Sequence[TensorSummary]], Severity] = ERROR,
    **more: Any,
) -> Iterator[Finding]:
    def said(tensor: TensorSummary) -> str:
        copy = ", an averaged copy," if tensor.role == "ema" else ""
        return (
            f"{label(tensor)}{copy} holds {_counts(tensor)} among {tensor.examined:,} values in {short(tensor.dtype)}."
        )

    yield from each_tensor(summary, rule, tensors, said, "are not finite", severity=severity, nonfinite=True, **more)


def _without(tensor: TensorSummary) -> Prescription:
    """Returns the change: without its state, which the optimizer then creates anew."""
    detail = f"Drop the optimizer state of {tensor.name} before resuming."
    return not_replayed("optimizer", {"reset_state": [address(tensor)]}, detail)


def _counts(tensor: TensorSummary) -> str:
    parts = ((tensor.nan, "NaN"), (tensor.pos_infs, "+Inf"), (tensor.neg_infs, "-Inf"))
    return ", ".join(f"{count:,} {word}" for count, word in parts if count)


def _number_finding(summary: CheckpointSummary, lost: Sequence[LostNumbers], severity: Severity) -> Finding:
    first = lost[0]
    name = first.name or "the file"
    end = "" if severity == "warning" else f", and the last is {first.last:.4g}"
    what = f"{first.nans:,} of {first.count:,} numbers in {name} are NaN{end}"
    what = f"{name} is NaN" if first.count == 1 else what
    more = f", and so are numbers in {len(lost) - 1} more places" if len(lost) > 1 else ""
    place = Where(phase="checkpoint", op="number", tensor=first.name or None, file=first.file or None)
    return NON_FINITE_TENSOR.finding(
        severity,
        f"{what}{more}.",
        where=replace(place, global_step=summary.global_step, nonfinite="nan"),
        also=tuple(replace(place, tensor=one.name or None, file=one.file or None) for one in lost[1:]),
        evidence={
            "numbers": first.count,
            "nans": first.nans,
            "infs": first.infs,
            "listed": [one.name for one in lost[:MAX_LISTED]],
        },
    )


IMPOSSIBLE_VALUE = rule("AMP106", SCANNED, ruins_checkpoint=True)


@IMPOSSIBLE_VALUE.judges(CheckpointSummary)
def _impossible_value(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    def severity(tensors: Sequence[TensorSummary]) -> Severity:
        least = -thresholds[IMPOSSIBLE_VALUE["epsilon"]]
        harmless = all(t.entry == "running_var" and (t.lowest or 0.0) >= least for t in tensors)
        return "warning" if harmless else "error"

    yield from each_tensor(
        summary,
        IMPOSSIBLE_VALUE,
        [t for t in summary.tensors if t.negatives and t.lowest is not None],
        lambda t: (
            f"{t.negatives:,} of {t.examined:,} values of {label(t)} are negative, down to {t.lowest:.4g}. None can be."
        ),
        "hold negative values, and cannot",
        severity=severity,
        more=lambda t: {"negatives": t.negatives, "lowest": t.lowest},
    )
    below = [t for t in summary.indices if t.lowest < 0]
    if below:
        counter = below[0]
        more = f" {len(below) - 1} more do so." if len(below) > 1 else ""
        yield IMPOSSIBLE_VALUE.finding(
            "warning",
            f"{address(counter)} is a count, and negative: {counter.lowest:,.6g}.{more}",
            where=where_of(counter, summary.global_step),
            also=also_of(counter, below),
            cause="bad_checkpoint",
            evidence={"dtype": counter.dtype, "shape": list(counter.shape), "lowest": counter.lowest},
        )


WRONG_BUFFER = rule("AMP110", SCANNED, ruins_checkpoint=True)


@WRONG_BUFFER.judges(CheckpointSummary)
def _wrong_buffer(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    gammas = {(t.file, t.group, t.module): t for t in summary.tensors if t.entry == "weight" and t.module}
    for tensor in summary.tensors:
        if tensor.role not in {"buffer", "ema"} or not tensor.blank or tensor.examined < 2:
            continue
        gamma = gammas.get((tensor.file, tensor.group, tensor.module))
        if tensor.entry == "running_var" and not (gamma is not None and gamma.blank):
            what = f"All {tensor.examined:,} running variances of {address(tensor)} are 0"
            harm = "in evaluation the layer divides by the root of its epsilon alone"
        elif tensor.entry == "inv_freq":
            what = f"All {tensor.examined:,} frequencies of {address(tensor)} are 0"
            harm = "every position is rotated by nothing"
        else:
            continue
        yield _buffer(summary, tensor, f"{what}: {harm}.", {"elements": tensor.examined})
    for table in summary.indices:
        numel = math.prod(table.shape)
        if table.displaced and (table.rounded_as or table.displaced <= thresholds[WRONG_BUFFER["displaced"]] * numel):
            why = f", as a cast to {table.rounded_as} rounds them" if table.rounded_as else ""
            message = (
                f"{table.displaced:,} of {numel:,} positions of {address(table)} are not the number of their place"
                f"{why}. Tokens there get another position."
            )
            yield _buffer(summary, table, message, {"elements": numel, "displaced": table.displaced})


def _buffer(
    summary: CheckpointSummary, tensor: TensorSummary | IndexSummary, message: str, evidence: dict[str, int]
) -> Finding:
    return WRONG_BUFFER.finding(
        "warning",
        message,
        where=where_of(tensor, summary.global_step),
        cause="bad_checkpoint",
        evidence={"dtype": tensor.dtype, "shape": list(tensor.shape), **evidence},
    )


EMPTY_MODEL = rule("AMP112", SCANNED)

_ENGINE_FILE = re.compile(r"(^|/)(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt$")
"""DeepSpeed's file of a rank: with ZeRO-3, its weights are in pieces in the optimizer's files (AMP112)."""


@EMPTY_MODEL.judges(CheckpointSummary)
def _empty_model(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    hollow = [t for t in weights if 0 in t.shape and not _ENGINE_FILE.search(t.file)]
    matrices = [t for t in weights if len(t.shape) >= 2 and t.examined]
    elements = sum(t.examined for t in matrices)
    if len(hollow) >= 2 and 2 * len(hollow) >= len(weights):
        message = (
            f"{len(hollow):,} of {len(weights):,} weights have no element, {address(hollow[0])} first. They were saved "
            "before they were gathered from the processes that hold them."
        )
        shown = hollow
    elif len(matrices) >= 2 and all(t.blank for t in matrices) and elements >= thresholds[EMPTY_MODEL["elements"]]:
        message = f"All {len(matrices):,} matrices of the model are exactly zero, {address(matrices[0])} first."
        shown = matrices
    else:
        return
    worst = shown[0]
    yield EMPTY_MODEL.finding(
        "error",
        message,
        where=where_of(worst, summary.global_step),
        also=also_of(worst, shown),
        cause="bad_checkpoint",
        evidence={"tensors": len(shown), "weights": len(weights), "listed": listed(shown)},
    )


FOREIGN_OBJECTS = rule("AMP109", SCANNED)

MAX_NAMED = 3  # unsafe names that a sentence lists
_RUNS_CODE = re.compile(
    r"(?:os|posix|nt|subprocess|pty|runpy|codeop|ctypes|socket|shutil|importlib|webbrowser|sys|pydoc|timeit|pdb|bdb)\..*"
    r"|(?:builtins|__builtin__)\.(?:eval|exec|execfile|compile|open|__import__|input|breakpoint)"
)
"""What runs commands or code, or reaches files and the network; no saved object is of these modules' classes."""


@FOREIGN_OBJECTS.judges(CheckpointSummary)
def _foreign_objects(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    names = summary.unsafe_globals
    if not names:
        return
    runs = [name for name in names if _RUNS_CODE.fullmatch(name)]
    message = (
        f"torch.load(weights_only=True) refuses this file: it asks for {_listed(runs or names)}. "
        f"Its unsafe mode {'would run code by these names' if runs else 'loads it, and runs whatever the file says'}."
    )
    yield FOREIGN_OBJECTS.finding(
        "warning" if runs else "note",
        message,
        where=Where(phase="checkpoint", global_step=summary.global_step),
        evidence={"count": len(names), "names": list(names[:MAX_LISTED])}
        | ({"runs_code": runs[:MAX_LISTED]} if runs else {}),
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"
