"""Runs a recorded step again: on its own model or a rebuilt one, on one rank, from a checkpoint on."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from ampdoctor.errors import CheckpointError, CollectiveError, ReplayError
from ampdoctor.hooks.nested import copy_batch, iter_kind, iter_tensors, map_kind, map_tensors, move_batch
from ampdoctor.hooks.process_state import are_joined, is_by_horovod, is_ours, refused
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    InputRef,
    Instruction,
    Mode,
    Op,
    ParamRef,
    Program,
    Reference,
    ResultRef,
    Scaled,
    Unscaled,
    called_as_recorded,
    recorded_at,
    references,
    results,
    updates_made,
)
from ampdoctor.precision.casting import HALVES
from ampdoctor.replay.snapshot import format_of_weights
from ampdoctor.replay.training_run import TrainingRun

if TYPE_CHECKING:
    from ampdoctor.hooks.program import EarlierStep, PriorSteps


def mode_of(instruction: Instruction) -> Mode | None:
    """Returns the autocast and gradient mode of an instruction; None for a kind that has none."""
    return instruction.mode if isinstance(instruction, Call | Op | Backward) else None


class RecordedStep:
    """Runs a step's instructions and its update; tensors are released after their last use."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._last: dict[int, int] = {}
        for place, one in enumerate(program.instructions):
            for reference in (*references(one), *results(one)):
                if isinstance(reference, ResultRef):
                    self._last[reference.index] = place

    def run(self, model: nn.Module, given: list[torch.Tensor], scaler: Any) -> torch.Tensor | None:
        """Run the step; returns the unscaled sum of its losses, 0-dim, or None without a loss."""
        program = self._program
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        made: dict[int, torch.Tensor] = {}

        def named(reference: Reference) -> torch.Tensor:
            if isinstance(reference, InputRef):
                return given[reference.index]
            if isinstance(reference, ParamRef):
                return held[reference.name]
            if reference.index not in made:
                raise ReplayError(
                    "what the recorded step takes next, the model does not return here: its forward is another"
                )
            return made[reference.index]

        with torch.no_grad():
            for name, value in program.buffers.items():
                held[name].copy_(value)
        model.zero_grad(set_to_none=True)
        run = _Run(model, scaler, program, named)
        for place, instruction in run.in_their_modes(program.instructions):
            made.update(run.one(instruction))
            for index in [index for index in made if self._last.get(index, place) <= place]:
                del made[index]
        if program.optimizer is not None:
            with recorded_at(program.line):
                scaler.step(program.optimizer)
                scaler.update()
        return run.loss


class _Run:
    def __init__(
        self, model: nn.Module, scaler: Any, program: Program, named: Callable[[Reference], torch.Tensor]
    ) -> None:
        self._model, self._scaler, self._named = model, scaler, named
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._program = program
        self.loss: torch.Tensor | None = None  # the sum of the losses so far, or the value with which the loop ended
        self._losses: dict[ResultRef, torch.Tensor] = {}

    def in_their_modes(self, instructions: tuple[Instruction, ...]) -> Iterator[tuple[int, Instruction]]:
        """Yields each instruction inside its recorded autocast, which is entered once for consecutive instructions."""
        with ExitStack() as stack:
            entered: Mode | None = None
            for place, one in enumerate(instructions):
                mode = mode_of(one)
                if mode != entered:
                    stack.close()
                    entered = mode
                    if mode is not None:
                        stack.enter_context(_in_mode(mode, self._device))
                yield place, one

    def one(self, instruction: Instruction) -> Mapping[int, torch.Tensor]:
        with recorded_at(instruction.line):
            match instruction:
                case Call() | Op():
                    return self._called(instruction)
                case Scaled():
                    loss = self._named(instruction.loss)
                    scaled = self._scaler.scale(loss)
                    self._losses[instruction.result] = loss.detach()
                    return {instruction.result.index: scaled}
                case Backward():
                    self._backward(instruction)
                case Unscaled():
                    if self._program.optimizer is not None:
                        self._scaler.unscale_(self._program.optimizer)
                case Clipped():
                    self._clip(instruction)
                case Ended():
                    self._end(self._named(instruction.value).detach())
            return {}

    def _called(self, instruction: Call | Op) -> Mapping[int, torch.Tensor]:
        args, kwargs = (map_kind(Reference, self._named, part) for part in (instruction.args, instruction.kwargs))
        if instruction.random is not None:
            instruction.random.restore()
        if isinstance(instruction, Op):
            output = called_as_recorded(instruction.function, args, kwargs)
        else:
            module = self._model.get_submodule(instruction.model)
            if module.training != instruction.training:
                module.train(instruction.training)
            output = called_as_recorded(module, args, kwargs)
        tensors = dict(iter_tensors(output))
        return {made.index: tensors[path] for path, made in instruction.results.items() if path in tensors}

    def _backward(self, instruction: Backward) -> None:
        roots = [self._named(root) for root in instruction.roots]
        seeds = [
            None if seed is None else self._named(seed).to(root.dtype)
            for seed, root in zip(instruction.seeds, roots, strict=True)
        ]
        inputs = [self._named(one) for one in instruction.inputs]
        torch.autograd.backward(roots, seeds, retain_graph=instruction.kept, inputs=inputs or None)
        for reference, root in zip(instruction.roots, roots, strict=True):
            if root.numel() == 1:
                loss = self._losses.get(reference, root.detach()) if isinstance(reference, ResultRef) else root.detach()
                # half-precision losses are summed in fp32
                wide = torch.promote_types(loss.dtype, torch.float32)
                self.loss = loss if self.loss is None else self.loss.to(wide) + loss.to(wide)

    def _end(self, value: torch.Tensor) -> None:
        """Use a scalar as the loss; otherwise raise FloatingPointError if a value is not finite, as the loop did."""
        if value.numel() == 1:
            self.loss = value
        elif not math.isfinite(value.abs().amax().item()):
            raise FloatingPointError("the loop's own code ended the step where this was not finite")

    def _clip(self, instruction: Clipped) -> None:
        parameters = [self._named(parameter) for parameter in instruction.parameters]
        torch.nn.utils.clip_grad_norm_(parameters, instruction.max_norm, instruction.norm_type)


@contextmanager
def _in_mode(mode: Mode, device: str) -> Iterator[None]:
    """Enter the recorded mode for the model's present device: a step from a GPU may run on a CPU."""
    kind, dtype = mode.autocast if mode.autocast is not None else ("cpu", torch.bfloat16)
    kind = "cpu" if device == "cpu" else kind
    with (
        torch.set_grad_enabled(mode.gradients),
        torch.autocast(kind, dtype, enabled=mode.autocast is not None, cache_enabled=mode.cached),
    ):
        yield


# -- the recorded step as a TrainingRun --


def run_of(program: Program) -> TrainingRun:
    """Returns a `TrainingRun` of the one step; its batch is the step's input tensors, which a new precision casts."""
    optimizer = None if program.optimizer is None else {program.optimizer_name: program.optimizer}
    precision, autocast = format_of(program)
    step = RecordedStep(program)
    return TrainingRun(
        model=program.model,
        batches=[dict(zip(_names_of_given(program), program.given, strict=True))],
        optimizer=optimizer,
        precision=precision,
        autocast=autocast,
        scaler=program.scaler,
        step=lambda model, batch, scaler: step.run(model, list(batch.values()), scaler),
        first_step=program.step,
    )


def _names_of_given(program: Program) -> list[str]:
    names: dict[int, str] = {}
    taken = Counter[str]()
    for one in program.instructions:
        if not isinstance(one, Call | Op):
            continue
        for path, reference in iter_kind(Reference, (one.args, one.kwargs)):
            if isinstance(reference, InputRef) and reference.index not in names:
                at = "" if one.line is None else f" at {Path(one.line[0]).name}:{one.line[1]}"
                name = f"{_argument(program.model, one, path)}{at}"
                taken[name] += 1
                names[reference.index] = name if taken[name] == 1 else f"{name}, {taken[name]}"
    return [names.get(index, str(index)) for index in range(len(program.given))]


def _argument(model: nn.Module, one: Call | Op, path: str) -> str:
    if isinstance(one, Op):
        return f"what {getattr(one.function, '__name__', 'an op')} takes"
    kind, _, rest = path.partition(".")
    first, _, inside = rest.partition(".")
    if kind == "0":
        names = list(signature(model.get_submodule(one.model).forward).parameters)
        first = names[int(first)] if int(first) < len(names) else f"argument {first}"
    return f"{first}.{inside}" if inside else first


def format_of(program: Program) -> tuple[str, bool]:
    """Returns the step's format ("fp16", "bf16", "fp32"), and whether it comes from autocast."""
    casts = [mode.autocast[1] for one in program.instructions if (mode := mode_of(one)) and mode.autocast is not None]
    halves = [HALVES[dtype] for dtype in casts if dtype in HALVES]
    if halves:
        return ("fp16" if "fp16" in halves else "bf16"), True
    return format_of_weights(program.model), False


# -- from a checkpoint to a recorded step: the recorded updates between them are run again --

AGREE = 1e-3
"""Losses count as equal up to this relative difference: other machines and thread counts round differently."""
_LEAST = 1e-30


class LeadUp:
    """Finds the recorded step at which a checkpoint was saved, and runs the updates from there again."""

    def __init__(self, program: Program, leading: PriorSteps) -> None:
        self._program, self._leading = program, leading
        self._settings = () if program.optimizer is None else tuple(map(_settings, program.optimizer.param_groups))

    def __call__(self, loaded: Collection[str], say: Callable[[str], None]) -> Iterator[EarlierStep]:
        """See `TrainingRun.lead_up`; `loaded` has the loaded parts as in `ResumeReport`, `say` gets the position."""
        optimizer = self._program.optimizer
        if optimizer is None:
            return
        behind = self._from(0 if "optimizer" in loaded and not optimizer.state else updates_made(optimizer), say)
        off: list[float] = []
        for one, loss in zip(behind, self._leading.losses[len(self._leading.losses) - len(behind) :], strict=True):
            yield f"the recorded step {one.step}", partial(_again, one, loss, off.append)
        _put(optimizer, self._settings)
        others = [one for one in off if not one <= AGREE]
        if others:
            by = f", by up to {max(others):.2g} of it" if all(map(math.isfinite, others)) else ", and not finite"
            say(
                f"{len(others)} of the {_counted(len(behind))} have another loss here than in the training{by}: the "
                "weights before the step are others than it had"
            )

    def _from(self, stands: int | None, say: Callable[[str], None]) -> tuple[Program, ...]:
        steps, made, step = self._leading.steps, self._leading.made, self._program.step
        if stands is None or made is None:
            who = "the optimizer" if made is None else "the checkpoint"
            place = f"the first of the {_counted(len(steps))} before it" if steps else "the step"
            say(
                f"{who} does not count its updates: the checkpoint is taken to have been saved right before {place}; "
                "if it was not, the weights are others than the training's"
            )
            return steps
        first = made - len(steps)
        if not first <= stands <= made:
            holds = f"steps {step - len(steps)} to {step}" if steps else f"step {step} alone"
            fits = f"{first} to {made}" if steps else str(made)
            when = f"after the update of step {step}" if stands > made else f"too long before step {step}"
            raise CheckpointError(
                f"the checkpoint was saved {when}: its optimizer had made {stands} updates, and the bundle holds "
                f"{holds}, which go on from {fits} updates"
            )
        behind = steps[len(steps) - (made - stands) :]
        if behind:
            were = "was" if len(behind) == 1 else "were"
            say(
                f"{_counted(len(behind))} {were} made again from the checkpoint, to come to the weights before the step"
            )
        return behind


def _counted(updates: int) -> str:
    return f"{updates} recorded update{'' if updates == 1 else 's'}"


def _again(
    program: Program, then: float | None, differs: Callable[[float], None], model: nn.Module, scaler: Any
) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if program.optimizer is not None:
        _put(program.optimizer, program.settings)
    given = list(move_batch(copy_batch(program.given), device))  # a step may write into an input that steps share
    loss = RecordedStep(program).run(model, given, scaler)
    if loss is not None and then is not None:
        differs(abs(float(loss) - then) / max(abs(then), _LEAST))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _put(optimizer: torch.optim.Optimizer, settings: Collection[Mapping[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


# -- Accelerate's autocast: it is inside a model's forward, so a call recorded outside lacks it --


def with_inner_autocast(program: Program) -> Program:
    """Puts the calls of models that Accelerate has prepared under its autocast."""
    prepared = prepared_models(program.model)
    if not prepared:
        return program
    cast = _cast(program.model)
    if cast is None:
        return program

    def under(one: Any) -> Any:
        if not isinstance(one, Call) or one.mode.autocast is not None or one.model not in prepared:
            return one
        return replace(one, mode=Mode(autocast=cast, cached=one.mode.cached, gradients=one.mode.gradients))

    return replace(program, instructions=tuple(map(under, program.instructions)))


def prepared_models(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of modules whose forward Accelerate has wrapped: their outputs are converted to fp32."""
    return tuple(name for name, part in model.named_modules() if "_original_forward" in vars(part))


def _cast(model: nn.Module) -> tuple[str, torch.dtype] | None:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: Mapping[str, Any] = getattr(state, "_shared_state", {})
    dtype = next((dtype for dtype, name in HALVES.items() if name == shared.get("_mixed_precision")), None)
    device = next((p.device.type for p in model.parameters()), "cpu")
    return None if dtype is None else (device if device in ("cpu", "cuda") else "cpu", dtype)


def converts_outputs(model: nn.Module) -> None:
    """Convert a fresh model's outputs to fp32, as Accelerate's wrapper does."""

    def converted(_module: nn.Module, _args: Any, output: Any) -> Any:
        return map_tensors(lambda one: one.float() if one.dtype in HALVES else one, output)

    model.register_forward_hook(converted)


# -- one rank's model without communication --

_DDP, _FSDP = "DistributedDataParallel", ("FullyShardedDataParallel", "FSDPModule")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def lies_in_parts(model: nn.Module) -> str | None:
    """Returns the sharding because of which a model runs only on all its processes; None if parameters are whole."""
    for module in model.modules():
        if _is_a(module, *_FSDP):
            return "FSDP"
        if _is_a(module, _DDP) and getattr(module, "mixed_precision", None) is not None:
            return "DDP's own mixed precision"
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "ds_id"):
            return "DeepSpeed's ZeRO-3"
        if hasattr(tensor, "to_local"):
            return "DTensor"
    return None


@contextmanager
def on_its_own(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Inside, a step of the model uses this rank alone, and a collective raises before it is launched.

    DDP runs its module, and its reducer takes no part: the reducer counts calls and gradients of a step, and a second
    run of a step would spoil its counts. Its hooks belong to the parameters' autograd state, so inside each parameter
    gets another one, over the same memory. This also leaves out the loop's own gradient hooks, as they may communicate.
    `SyncBatchNorm` normalises with this rank's own statistics.

    Yields sentences about what is left out (none without a process group); raises CollectiveError for Horovod, whose
    optimizer communicates in the backward.
    """
    if is_by_horovod():
        raise CollectiveError(
            "the job's processes are joined by Horovod, whose collectives cannot be left out: the step can be run "
            "again where all of them run it, and not here"
        )
    if not are_joined():
        yield ()
        return
    said = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if _is_a(module, _DDP):
                stack.enter_context(_instead(module, _pre_forward=_moved(module), _post_forward=lambda made: made))
            elif isinstance(module, SyncBatchNorm):
                said.append(f"{name or 'the model'} (SyncBatchNorm) took the statistics of this rank's batch alone")
                stack.enter_context(_instead(module, forward=partial(_BatchNorm.forward, module)))
        hooked = [name for name, p in model.named_parameters() if stack.enter_context(_without_hooks(p))]
        if hooked:
            said.append(
                f"gradient hooks of the loop's own were not run, as they may communicate: on {hooked[0]}"
                + (f" and {len(hooked) - 1} more" if len(hooked) > 1 else "")
            )
        stack.enter_context(refused())
        yield tuple(said)


def _is_a(module: nn.Module, *names: str) -> bool:
    """Compares class names, because importing the wrappers' modules is slow or impossible."""
    return any(cls.__name__ in names and cls.__module__.startswith("torch.") for cls in type(module).__mro__)


@contextmanager
def _instead(module: nn.Module, **methods: Any) -> Iterator[None]:
    own = vars(module)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del own[name]
        own.update(before)


def _moved(ddp: Any) -> Any:
    """DDP's code before a forward, without communication: inputs go to its device."""

    def moved(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not ddp.device_ids:
            return args, kwargs
        from torch.distributed.utils import _to_kwargs

        device = torch.device(ddp.device_type, ddp.device_ids[0])
        inputs, named = _to_kwargs(args, kwargs, device, ddp.use_side_stream_for_tensor_copies)
        return inputs[0], named[0]

    return moved


@contextmanager
def _without_hooks(parameter: torch.Tensor) -> Iterator[bool]:
    """Gives the parameter its own gradient and no hooks; values and version are shared. Yields whether it had hooks."""
    if type(parameter) not in (nn.Parameter, torch.Tensor) or not parameter.requires_grad:
        yield False
        return
    hooks = {name: getattr(parameter, name) for name in _HOOKS}
    other = nn.Parameter(parameter.detach())
    torch._C._swap_tensor_impl(parameter, other)  # noqa: SLF001 - torch has no other way to leave a reducer out
    _hang(parameter, dict.fromkeys(_HOOKS))
    try:
        yield any(not is_ours(hook) for hung in hooks.values() for hook in (hung or {}).values())
    finally:
        torch._C._swap_tensor_impl(parameter, other)  # noqa: SLF001
        _hang(parameter, hooks)


def _hang(parameter: torch.Tensor, hooks: dict[str, Any]) -> None:
    for name, hung in hooks.items():
        if getattr(parameter, name) is not hung:
            setattr(parameter, name, hung)
