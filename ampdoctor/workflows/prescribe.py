"""Prescriptions: candidate changes for a cause, in settings and in the user's code, replayed until one cures."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampdoctor.diagnosis.replay.nonfinite import HELP, STATE, batch_is_at_fault, batch_may_be_at_fault, log2_over_limit
from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Cause, Prescription
from ampdoctor.evidence.trace import LOST
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.probes.modules import optimizer_parameters
from ampdoctor.probes.op_overrides import How, Intervention, OwnOps, UserLine, address_of
from ampdoctor.probes.ops import torch_name
from ampdoctor.workflows import changes as change
from ampdoctor.workflows.changes import rescaled
from ampdoctor.workflows.repairs import fix_scaler_misuse, repair
from ampdoctor.workflows.trials import NO_SCALER, SHOWN, first_cure

if TYPE_CHECKING:
    from ampdoctor.evidence.trace import NonFiniteOrigin
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.changes import Change
    from ampdoctor.workflows.trials import Trials


# -- interventions: changes that only the user's code can make, tried at the line of an origin --

FP32_MAX = FORMATS["fp32"].max
Way = tuple[How, Sequence[UserLine]]
"""What is changed, and where."""


def intervene(origins: Sequence[NonFiniteOrigin], trials: Trials, *, first_only: bool = False) -> Prescription:
    """Try changes at the lines of all origins until a replay cures, or only one change with `first_only`."""
    address = address_of(origins[0])
    if address is None:
        return Prescription(
            kind="code",
            value="change the op",
            status="not_run",
            detail="change the op",
            reason="no line of the user's code runs the op, so nothing can be put in its place",
        )
    addresses = [a for a in map(address_of, origins) if a is not None]
    lost_at = _lost_at(origins[0])
    ways: list[Way] = [(how, addresses) for how in _ways(origins[0])]
    ways += [("line_fp32", [lost_at, *addresses])] if lost_at is not None else []
    return intervene_at(ways[:1] if first_only else ways, trials)


def intervene_at(ways: Sequence[Way], trials: Trials) -> Prescription:
    """Try changes at lines (at least one) until a replay cures; returns that one, or else the first."""
    tried: list[Prescription] = []
    for how, places in ways:
        tried.append(_attempt(places, how, trials))
        if tried[-1].status == "intervention":
            return tried[-1]
    return tried[0]


def _ways(origin: NonFiniteOrigin) -> tuple[How, ...]:
    """Returns what may help, likeliest first, from the op's recomputation in float64 on the same inputs."""
    verdict = origin.recomputed
    if any(stats.dtype.startswith("float8") for stats in origin.outputs):
        return ("guard", "fp32")  # the cast to FP8 is intended: its input must be kept in range
    if verdict is not None and not verdict.finite:
        return ("guard", "line_fp32", "line_guard")
    if verdict is not None and verdict.amax > FP32_MAX:
        return ("fp64", "line_fp64", "guard")
    if origin.where.phase == "backward":
        return ("line_fp32", "fp32", "guard")  # the derivative must stay in fp32 until it has left the line
    return ("fp32", "line_fp32", "guard")


def _lost_at(origin: NonFiniteOrigin) -> UserLine | None:
    """Returns the line whose narrow format lost what the origin needs, if it is another line."""
    operand = origin.operand
    if operand is None or operand.made_by not in LOST or operand.op is None:
        return None
    if operand.source is None or operand.source in (origin.where.source, origin.where.forward_source):
        return None
    return UserLine(operand.source, operand.op.removeprefix("aten."))


def _attempt(addresses: Sequence[UserLine], how: How, trials: Trials) -> Prescription:
    """Try one way; in a model that is half throughout, the result may have to become half again for later ops."""
    for narrow in (False, True):
        mode = Intervention(addresses, how, narrow=narrow)
        detail = _words(addresses, how, mode)
        result = trials.attempt("code", detail, _change(mode), detail, stands_in=True)
        if trials.comes_back and addresses[0] not in mode.met:
            return replace(result, status="not_run", reason="the replay did not meet the op at that line again")
        if result.status == "not_run":
            continue
        break
    counts = result.detail.removeprefix(detail)
    detail = _words(addresses, how, mode)
    if result.status == "failed" and addresses[0] in mode.helpless:
        result = replace(result, reason=f"{result.reason}; no bound on its operands makes the op finite")
    return replace(result, value=detail, detail=detail + counts)


def _change(mode: Intervention) -> Change:
    @contextmanager
    def change(session: Session) -> Iterator[None]:  # noqa: ARG001 - the seam's signature
        with mode.watching():
            yield

    return change


def _words(addresses: Sequence[UserLine], how: How, mode: Intervention) -> str:
    address = addresses[0]
    place, *others = dict.fromkeys(f"{one.source.file}:{one.source.line}" for one in addresses)
    too = f", and {' and '.join(others)} as well" if others else ""
    op = torch_name(address.op)
    guards = {name: guard.words(torch_name(name)) for (at, name), guard in mode.guards.items() if at == address}
    if guards:
        wide = address.in_fp32 and {name.rstrip("_") for name in guards} == {address.op.rstrip("_")}
        return f"{place}: {'' if wide else 'in fp32 (autocast off, inputs .float()), '}{'; '.join(guards.values())}"
    beyond = f"{op} does not fit fp32 either: rewrite"
    return {
        "guard": f"{place}: run {op} in fp32 (autocast off, inputs .float()), and guard its operands",
        "line_guard": f"{place}: compute this line in fp32, and guard the operands of its ops",
        "fp32": f"{place}: run {op} in fp32 (autocast off, inputs .float(), result left in fp32)",
        "line_fp32": f"{place}: compute this line in fp32 (autocast off, inputs .float()){too}",
        "fp64": f"{place}: {beyond} the formula (in log space); in fp64 the step is right",
        "line_fp64": f"{place}: {beyond} this line (in log space); in fp64 the step is right",
    }[how]


# -- other kernels for the same arithmetic: tried first, because nothing else of the run changes --

AROUND = "a way around, which runs another kernel and proves no cause"
"""Said of another format where a kernel is at fault."""


def other_kernels(origin: NonFiniteOrigin, trials: Trials, session: Session) -> Iterator[Prescription]:
    """Try torch's other kernels for the op, on the device of the replay."""
    foreign = not origin.kernel.startswith("aten.")  # a library's operator may stand behind any of torch's functions
    if foreign or "attention" in origin.kernel or "attention" in (origin.where.op or ""):
        words = "torch's own attention: with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): around the step"
        yield trials.attempt("code", words, _attention, words, stands_in=True)
    if session.device.type == "cuda":
        words = "cuDNN off: torch.backends.cudnn.enabled = False"
        yield trials.attempt("code", words, _without_cudnn, words, stands_in=True)
    elif torch.backends.mkldnn.is_available():
        words = "oneDNN off: torch.backends.mkldnn.enabled = False"
        yield trials.attempt("code", words, _without_onednn, words, stands_in=True)


def around(tried: Iterator[Prescription]) -> Iterator[Prescription]:
    """Yields the same attempts, each named as a way around."""
    for one in tried:
        yield replace(one, detail=f"{one.detail.removesuffix('.')} ({AROUND})")


@contextmanager
def _attention(session: Session) -> Iterator[None]:  # noqa: ARG001 - the seam's signature
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _without_cudnn(session: Session) -> AbstractContextManager[Any]:  # noqa: ARG001 - the seam's signature
    flags: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=False)
    return flags


@contextmanager
def _without_onednn(session: Session) -> Iterator[None]:  # noqa: ARG001 - the seam's signature
    before = torch.backends.mkldnn.set_flags(False)[0]  # `flags` also sets what only Intel's GPUs have, and warns
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


# -- candidate changes for a cause, smallest first --

EPSILON = 1e-3
"""An optimizer epsilon well above fp16's smallest normal number (6e-5), so that fp16 and bf16 state hold it."""

FP32_FAILS = (
    "The same step is not finite in fp32 either, so no precision and no loss scale cures it: look at the learning "
    "rate, the data and the formula."
)
SCALES = (2.0**16, 2.0**12, 2.0**20, 2.0**24)
"""Loss scales tried against underflow: torch's default, then a lower one in case it overflows, then higher ones."""

_PRECISIONS_OWN = ("forward_overflow", "backward_overflow", "invalid_op")
"""Causes that a format may be behind: if nothing smaller cures, fp32 throughout does, provided fp32 is finite."""
MOST_TRIALS = 60
"""Maximum number of trials of a search: enough to find a set of five among hundreds of modules."""
MOST_SCALES = 8
"""Number of lower loss scales to try, each a factor of 4 below the last."""


def prescribe(
    origin: NonFiniteOrigin, cause: Cause, trials: Trials, session: Session, *, others: Sequence[NonFiniteOrigin] = ()
) -> Prescription:
    """Returns the first candidate that a replay verifies, or else an intervention in the user's code."""
    origins = (origin, *others)
    if origin.came_from == "grad":
        return fix_scaler_misuse(origin.where.op or "", trials, session)
    cure = first_cure(_candidates(origins, cause, trials, session))
    if cure is None or cure.status not in SHOWN:
        return _in_code(origins, cause, trials, session, cure)
    return replace(cure, alternatives=(*cure.alternatives, *_beside(origins, cure, trials, session)))


def _in_code(
    origins: Sequence[NonFiniteOrigin], cause: Cause, trials: Trials, session: Session, failed: Prescription | None
) -> Prescription:
    """Returns a change of the user's own code; else fp32 or a skipped batch where that helps; else advice in words."""
    origin = origins[0]
    tried = (replace(failed, alternatives=()), *failed.alternatives) if failed is not None else ()
    if origin.came_from in STATE:
        code = repair([b.where for b in origins if b.came_from in STATE], trials)
    else:
        code = intervene(origins, trials)
    if code.status == "intervention":
        return replace(code, alternatives=tried)
    fails_anyway = trials.reference() is None and trials.unable is None
    last: Prescription | None = None
    if cause in _PRECISIONS_OWN and trials.reference() is not None:
        last = trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "train in fp32")
    elif cause == "invalid_op" and fails_anyway and batch_may_be_at_fault(origin) and not batch_is_at_fault(origin):
        last = _without_the_batch(origin, trials, session)
    if last is not None and last.verified:
        return replace(last, alternatives=(*tried, code))
    advice = FP32_FAILS if fails_anyway and cause != "bad_data" else HELP[cause]
    return replace(code, value=advice, detail=advice, alternatives=tried)


def _beside(
    origins: Sequence[NonFiniteOrigin], cure: Prescription, trials: Trials, session: Session
) -> Iterator[Prescription]:
    """Yields cheap alternatives to a verified change: bf16, a change of the line, the run without the batch."""
    origin = origins[0]
    if cure.kind == "fp32_modules" and len(cure.value) > 1 and session.precision.compute == "fp16":
        yield _in_bf16(trials, session)
    if cure.kind == "dtype" and not origin.where.module:
        yield intervene(origins, trials, first_only=True)
    if cure.kind == "fp32_modules" and origin.where.phase == "forward" and (origin.where.step or 0) > 0:
        yield _without_the_batch(origin, trials, session)


def scale_cure(
    origin: NonFiniteOrigin, trials: Trials, session: Session, used: float | None = None
) -> Prescription | None:
    """Try lower loss scales than `used`, from the one that removes the overflow down to 1; None without a scaler."""
    scale = session.events.scale()
    lowered: Callable[[float], Change] = change.loss_scale
    if scale is None or (used is not None and session.makes_scalers):
        scale, lowered = used, change.with_scaler
    if scale is None:
        return None
    scale = abs(scale)  # GradScaler accepts a negative scale, which overflows just as soon
    if not 0.0 < scale < math.inf:
        return None
    excess = log2_over_limit(origin) or 1.0
    wanted = 2.0 ** math.floor(math.log2(scale) - excess)
    # other gradients of the step may be larger than the first that overflowed: go on by factors of 4
    candidates = [s for s in (wanted / 4**i for i in range(8)) if s > 1.0] + [1.0]
    return first_cure(
        trials.attempt("init_scale", s, lowered(s), f"GradScaler(init_scale={exact(s)})") for s in candidates
    )


def fresh_scaler(trials: Trials) -> Prescription | None:
    """Try a new GradScaler in place of one that cannot work."""
    return first_cure(_scalers(trials))


def _scalers(trials: Trials) -> Iterator[Prescription]:
    for scale in SCALES:
        tried = trials.attempt(
            "scaler", {"init_scale": scale}, change.with_scaler(scale), f"GradScaler(init_scale={exact(scale)})"
        )
        yield tried
        if tried.reason == NO_SCALER:  # at no scale, then
            return


def underflow_cure(trials: Trials, session: Session) -> Prescription:
    """Try loss scales at which the gradients may agree with fp32 again, the usual one first; then bf16."""
    tried = (attempt for scales in (True, False) for attempt in underflow_cures(trials, session, scales=scales))
    return first_cure(tried) or Prescription(
        kind="code",
        value=HELP["grad_underflow"],
        status="not_run",
        detail=HELP["grad_underflow"],
        reason="the run does not compute in fp16",
    )


def underflow_cures(trials: Trials, session: Session, *, scales: bool) -> Iterator[Prescription]:
    """Try loss scales, the usual one first, or else bf16, against gradients that fp16 has lost."""
    if session.precision.compute != "fp16":
        return
    if scales:
        half = any(parameter.dtype is torch.float16 for parameter in optimizer_parameters(session))
        yield from () if half else _scalers(trials)  # a GradScaler refuses to unscale the gradients of fp16 weights
    else:
        yield trials.attempt("dtype", "bfloat16", change.compute_dtype("bf16"), "train in bf16")


def _candidates(  # noqa: C901 - one row for each cause
    origins: Sequence[NonFiniteOrigin], cause: Cause, trials: Trials, session: Session
) -> Iterator[Prescription]:
    origin = origins[0]
    compute = session.precision.compute
    if cause == "kernel_defect":
        yield from other_kernels(origin, trials, session)
        yield from around(_other_formats(origins, trials, session))
        return
    if cause == "bad_data":
        if origin.came_from == "op" and origin.where.module and trials.reference() is not None:
            yield from modules_in_fp32(origins, trials)  # a cast that fp32 avoids
        yield _without_the_batch(origin, trials, session)
        return
    if cause == "optimizer_precision":
        if change.mostly_frozen(session):
            words = change.TRAINED_IN_FP32
            yield trials.attempt("code", words, change.trained_in_fp32, words, stands_in=True)
        if not origin.after_backward:
            yield trials.attempt(
                "optimizer",
                {"eps": EPSILON},
                change.optimizer_argument("eps", EPSILON),
                f"optimizer epsilon {EPSILON:g}",
            )
        yield trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "fp32 weights and optimizer state")
        return
    if cause == "backward_overflow" and compute == "fp16" and not session.events.enabled:
        yield from _scales_by_hand(origin, trials)
    wide_fails = cause == "invalid_op" and trials.reference() is None and trials.unable is None
    if not wide_fails and cause in ("forward_overflow", "backward_overflow", "invalid_op") and origin.where.module:
        yield from modules_in_fp32(origins, trials)
    if not wide_fails and compute == "fp16" and cause != "bad_checkpoint":
        yield _in_bf16(trials, session)
    if cause == "invalid_op" and batch_is_at_fault(origin) and trials.reference() is None:
        yield _without_the_batch(origin, trials, session)


def _other_formats(origins: Sequence[NonFiniteOrigin], trials: Trials, session: Session) -> Iterator[Prescription]:
    if trials.reference() is None:
        return
    if origins[0].where.module:
        yield from modules_in_fp32(origins, trials)
    if session.precision.compute == "fp16":
        yield _in_bf16(trials, session)
    yield trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "train in fp32")


def _scales_by_hand(origin: NonFiniteOrigin, trials: Trials) -> Iterator[Prescription]:
    trials.reference()
    own = trials.by_hand
    if not (math.isfinite(own) and own >= 2.0):
        return
    first = math.floor(log2_over_limit(origin) or 0.0) + 1
    for binades in range(first, first + 2 * MOST_SCALES, 2):
        scale = own / 2.0**binades
        if scale < 1.0:
            return
        yield trials.attempt(
            "init_scale", scale, rescaled(2.0**-binades), f"scale the loss by {exact(scale)} in place of {exact(own)}"
        )


def modules_in_fp32(origins: Sequence[NonFiniteOrigin], trials: Trials) -> Iterator[Prescription]:
    """Try fp32 for the culprit's module, then for the modules of all origins, then for the smallest set that cures."""
    ran = OwnOps()
    known: dict[frozenset[str], Prescription] = {}

    def attempt(names: Sequence[str], *, watch: OwnOps | None = None) -> Prescription:
        tried = known.get(frozenset(names))
        if tried is None:
            made = (
                change.fp32_modules(names) if watch is None else change.both(change.fp32_modules(names), watch.attach)
            )
            tried = trials.attempt("fp32_modules", list(names), made, f"run {_listed(names)} in fp32")
            known[frozenset(names)] = tried
        return tried

    yield attempt([origins[0].where.module], watch=ran)
    if any(not origin.where.module for origin in origins):
        return  # one of the origins lies outside every module
    if known[frozenset([origins[0].where.module])].status == "not_run":
        return
    together = list(dict.fromkeys(origin.where.module for origin in origins))
    elements = [*ran.modules, *(name for name in together if name not in ran.modules)]
    found, minimal = smallest_set(
        elements,
        lambda names: attempt([name for name in elements if name in names]).verified,
        given=together,
        limit=MOST_TRIALS,
    )
    if not found:
        everything = known[frozenset(elements)]
        yield replace(everything, value=[""], detail=f"run all {len(elements)} modules that compute in fp32")
        return
    proof = "none can be left out" if minimal else "perhaps not the smallest set"
    cure = attempt(found)
    yield replace(cure, reason=f"{proof}: {len(known)} trials among {len(elements)} modules")


def _listed(names: Sequence[str]) -> str:
    shown = [name or "the whole model" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _in_bf16(trials: Trials, session: Session) -> Prescription:
    scaled = session.events.enabled or session.makes_scalers
    detail = "train in bf16" if session.precision.autocast else "train in bf16: model.to(torch.bfloat16)"
    if scaled or session.precision.autocast:
        detail += ", without a GradScaler"
    return trials.attempt("dtype", "bfloat16", change.compute_dtype("bf16"), detail)


def _without_the_batch(origin: NonFiniteOrigin, trials: Trials, session: Session) -> Prescription:
    step = origin.where.step or 0
    batch = step * session.batches_per_step + origin.where.micro_batch
    of = "" if session.batches_per_step == 1 else f" (the replay left out all of step {step})"
    return trials.attempt("skip_batch", batch, change.no_change, f"leave out batch {batch}{of}", from_step=step + 1)


# -- the smallest set of elements whose treatment makes a trial succeed, by QuickXplain (Junker, AAAI 2004) --

T = TypeVar("T", bound=Hashable)


class _OutOfTrialsError(Exception):
    """The limit of trials is reached."""


def smallest_set(  # noqa: C901 - its steps share what was tried
    elements: Sequence[T], cures: Callable[[frozenset[T]], bool], *, given: Sequence[T] = (), limit: int | None = None
) -> tuple[tuple[T, ...], bool]:
    """Find a smallest set of elements whose treatment was seen to cure; () if treating everything does not.

    Args:
        elements: One whose treatment includes that of others comes before them, so that it is dropped first.
        cures: Runs a trial in which exactly these are treated; one with none is known to fail, and is not run.
        given: Elements that are likely to be needed: these are tried first, by themselves.
        limit: Maximum number of trials.

    Returns:
        The set in the order of `elements`, and whether none of it can be left out: for each element a trial without it,
        but with all the others (and perhaps more), failed.
    """
    tried: dict[frozenset[T], bool] = {frozenset(): False}

    def well(treated: frozenset[T]) -> bool:
        if treated not in tried:
            if limit is not None and len(tried) > limit:
                raise _OutOfTrialsError
            tried[treated] = cures(treated)
        return tried[treated]

    def needs(element: T, found: frozenset[T]) -> bool:
        others = found - {element}
        return any(not cured and element not in treated and others <= treated for treated, cured in tried.items())

    def needed(beside: frozenset[T], among: Sequence[T], *, fails: bool = False) -> frozenset[T]:
        if not fails and well(beside):
            return frozenset()
        if len(among) == 1:
            return frozenset(among)
        half = len(among) // 2
        front = needed(beside | set(among[half:]), among[:half])
        return front | needed(beside | front, among[half:], fails=not front)

    def smallest() -> frozenset[T]:
        return min((treated for treated, cured in tried.items() if cured), key=len, default=frozenset())

    likely = frozenset(given)
    with suppress(_OutOfTrialsError):
        if well(likely):
            found = needed(frozenset(), given, fails=True)
        elif well(frozenset(elements)):
            found = likely | needed(likely, [element for element in elements if element not in likely], fails=True)
        else:
            return (), False
        if not well(found):  # elements interact
            found = smallest()
        for element in sorted(found, key=elements.index):
            others = found - {element}
            if others and not needs(element, found) and well(others):
                found = others
    found = smallest()
    minimal = all(len(found) == 1 or needs(element, found) for element in found)
    return tuple(element for element in elements if element in found), minimal
