"""`Session`: a training run that can be stepped, rewound, and stepped again with a change."""

from __future__ import annotations

import copy
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ampdoctor.errors import UserCodeError
from ampdoctor.evidence.trace import StepOutcome
from ampdoctor.hooks.callbacks import on_scaler_call
from ampdoctor.hooks.names import clean_names, clean_tensor_name, names_of_parameters
from ampdoctor.hooks.nested import cast_floats, iter_tensors, move_batch
from ampdoctor.hooks.process_state import RandomState, no_anomaly_mode, no_fast_path
from ampdoctor.hooks.scaler_events import StepEvents
from ampdoctor.precision.casting import REDUCED, CastInputs, TemporaryCast, cast_model, master_weights
from ampdoctor.precision.dtype_overrides import AutocastOverride, UpcastHalf, WideNumbers
from ampdoctor.precision.spec import Precision, as_plain_linears
from ampdoctor.replay.batches import BatchBuffer
from ampdoctor.replay.frameworks.accelerate import shared_states
from ampdoctor.replay.parts import (
    as_given,
    call_user_step,
    default_step,
    loss_number,
    optimizers_of,
    readable_loss,
    reject_uninitialized,
    scaler_of,
    schedulers_of,
    update_scaler_without_optimizer,
)
from ampdoctor.replay.python_state import DrawHooks, Reached
from ampdoctor.replay.reachable_state import roots_of
from ampdoctor.replay.snapshot import OtherScalers, Snapshot, tensors_of, weights_of
from ampdoctor.replay.tensor_store import TensorStore
from ampdoctor.replay.user_code import prints_to_nobody, shown_once, user_code

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import Probe
    from ampdoctor.hooks.program import EarlierStep
    from ampdoctor.precision.casting import MasterWeights
    from ampdoctor.replay.training_run import TrainingRun

_ROOM = 1 << 26  # bytes of tensors outside the run's parts that a snapshot holds; more if the model is larger
Change = Callable[["Session"], AbstractContextManager[None]]
"""A change to try on a replay: a context in which the session's steps run differently; its exit undoes the change."""


class Session:
    """A training run with its parts resolved: model on the device, optimizers by name, scaler, precision, batches.

    `user_code` surrounds each call of the user's code; `spill` is a folder for the values of snapshots; `shown` holds
    the steps whose output was shown.
    """

    def __init__(
        self,
        run: TrainingRun,
        *,
        device: torch.device,
        precision: str | None = None,
        user_code: Callable[[str], AbstractContextManager[None]] = lambda what: user_code(what=what),
        spill: Path | None = None,
        shown: set[object] | None = None,
    ) -> None:
        self.run = run
        self._spill = spill
        self._first: weakref.ref[Snapshot] | None = None
        self.device = device
        self._user_code = user_code
        self.model: nn.Module = run.model
        reject_uninitialized(self.model)
        compute: Any = precision or run.precision
        half = compute in ("fp16", "bf16")
        self.precision = Precision(
            compute=compute, autocast=run.autocast, master_weights=run.master_weights and half and not run.autocast
        )
        self._own_precision = self.precision
        self._cast_to: torch.dtype | None = None
        self._overridden = compute != run.precision
        self._wide_casts = False
        self.master_weights: MasterWeights | None = None
        self._names_of_master_weights: dict[int, str] = {}
        self._stack = ExitStack()
        try:
            self._build(precision)
        except BaseException:
            self._stack.close()
            raise
        self.module_names = clean_names(self.model)
        self.tape = BatchBuffer(run)
        self._others = OtherScalers(self.scaler)
        self._adopting: list[Callable[[Any], None]] = []
        self.events = StepEvents(self.model.parameters, self.optimizers, self.scaler, self._others.called)
        room = max(_ROOM, sum(tensor.nbytes for _, tensor in tensors_of(self.model) if not tensor.is_meta))
        drawing = DrawHooks(self.random_state, self._handed_out)
        self.reached = Reached(
            self._roots, self._parts, run.batches, room, drawing, steps_own=lambda: map(id, shared_states())
        )  # Accelerate's loaders hold these states, and its steps count in them
        self.micro_batch = 0
        self.replays = 0
        self.replays_of: Counter[int] = Counter()
        self.raised: UserCodeError | None = None
        self.told: Callable[[], None] | None = None
        self._probes: list[Probe] = []
        self._batches: list[Any] = []
        self._shown = set[object]() if shown is None else shown
        self._drawn: list[Any] = []

    def _build(self, precision: str | None) -> None:
        run, device = self.run, self.device
        casts = precision is not None and precision != run.precision and not run.autocast
        if casts or device.type != "cpu":
            self._stack.callback(weights_of(self.model))
            self.model.to(device)
        if casts and precision is not None:
            self._cast_to = _torch_dtype(precision)
            self.model.to(self._cast_to)
        with self._user_code("building the optimizer, scaler or scheduler"):
            self.optimizers = optimizers_of(run, self.model)
            self.scaler = scaler_of(run, device, enabled=self.precision.compute == "fp16")
            self.schedulers = schedulers_of(run, self.optimizers)
        if self.precision.master_weights:
            self.master_weights = self._stack.enter_context(master_weights(self.optimizers.values()))

    def state_loaded(self) -> None:
        """Update the fp32 master weights after a state was loaded into the model."""
        if self.master_weights is not None:
            self.master_weights.reload()

    def close(self) -> None:
        """Restore the optimizers' own parameters and the model's dtype, and stop the loader's workers."""
        self._stack.close()
        self.tape.close()
        self.reached.untape()

    # -- state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Returns a snapshot of everything that a step can change; it shares the values that equal the first one's."""
        parts = self.model, self.optimizers, self.scaler, self.schedulers
        taken = Snapshot(
            *parts,
            self._generators(),
            others=self._others.first,
            gradients=self.run.step is not None or not self.replays,  # our own step clears them first
            reached=self.reached,
            keeper=TensorStore(self._spill),
            like=None if self._first is None else self._first(),
        )
        if self._first is None or self._first() is None:
            self._first = weakref.ref(taken)
        return taken

    def _roots(self) -> Iterator[Any]:
        functions = self.run.loss, self.run.step, self.run.after_step
        return roots_of(functions, self.model.modules(), self.optimizers.values())

    def _parts(self) -> Iterator[int]:
        parts = self.run, self.scaler, *self.optimizers.values(), *self.schedulers
        modules = list(self.model.modules())
        tables = (table.values() for module in modules for table in (module._parameters, module._buffers))  # noqa: SLF001 - one walk
        yield from map(id, chain(parts, modules, *tables))

    def random_state(self, like: RandomState | None = None) -> RandomState:
        """Returns the states of all generators, with the loader's own; states equal to those in `like` are shared."""
        return RandomState.capture(self._generators(), like)

    def _generators(self) -> tuple[torch.Generator, ...]:
        generator = getattr(self.run.batches, "generator", None)
        return (generator,) if isinstance(generator, torch.Generator) else ()

    def clean_name(self, name: str) -> str:
        """See `ObservedRun`."""
        return clean_tensor_name(name, self.module_names)

    def own_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for floating-point tensors of the user's code outside model and optimizers."""
        leaves = ((name, tensor) for name, tensor in self.reached.tensors() if tensor.is_leaf)
        found = [(n, t) for n, t in leaves if t.is_floating_point() and t._base is None]  # noqa: SLF001
        taken = Counter(name for name, _ in tensors_of(self.model)) if found else Counter()
        for name, tensor in found:
            taken[name] += 1
            yield name if taken[name] == 1 else f"{name} (the run's own, {taken[name]})", tensor

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ObservedRun`: tensors shaped like a parameter or like all weights in a vector; others are readings."""
        shapes: set[torch.Size] = set()
        for name, tensor in self.own_state():
            if not shapes:
                shapes = {tensor.shape for _, tensor in tensors_of(self.model) if tensor.numel() > 1}
                shapes.add(torch.Size((sum(parameter.numel() for parameter in self.model.parameters()),)))
            if isinstance(tensor, nn.Parameter) or tensor.shape in shapes:
                yield name, tensor

    def parameter_names(self) -> dict[int, str]:
        """See `ObservedRun`."""
        return {**names_of_parameters(self.model, self.module_names, self.optimizers), **self._names_of_master_weights}

    @property
    def scaler_state(self) -> dict[str, Any] | None:
        """The `state_dict` of the run's own scaler, else of the first one that its steps used; None without one."""
        return self.scaler.state_dict() if self.events.enabled else self._others.state

    @property
    def makes_scalers(self) -> bool:
        """Do the steps use scalers that they make or hold themselves?"""
        return len(self._others.first) > 0

    @property
    def batches_per_step(self) -> int:
        """The number of batches in one optimizer step."""
        return 1 if self.run.step is not None else self.run.accumulation_steps

    def count_with(self, other: Session) -> None:
        """Add the replays of a session that replaced this one."""
        self.replays += other.replays
        self.replays_of.update(other.replays_of)

    # -- stepping ------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, *probes: Probe) -> Iterator[None]:
        """Attach probes while the context is open."""
        with ExitStack() as stack:
            stack.enter_context(self.events.watching())
            for probe in probes:
                stack.enter_context(probe.attach(self))
            before, self._probes = self._probes, [*self._probes, *probes]
            stack.callback(setattr, self, "_probes", before)
            yield

    @property
    def is_watched(self) -> bool:
        """Is a probe attached?"""
        return bool(self._probes)

    def has_step(self, step: int) -> bool:
        """Are there batches for optimizer step `step`? Missing batches are drawn from the loader."""
        needed = (step + 1) * self.batches_per_step
        with self._user_code("drawing a batch"), shown_once(self._shown, ("batch", step)):
            return self.tape.draw(needed) >= needed

    def keep_steps(self, needed: Callable[[int], bool]) -> None:
        """If the batches take too much memory, release those of steps that are not `needed`."""
        per = self.batches_per_step
        self.tape.keep(lambda batch: needed(batch // per))

    def batches_of(self, step: int) -> list[Any]:
        """Returns copies of a step's (micro-)batches, on the device and in the session's dtype."""
        per = self.batches_per_step
        batches = [move_batch(self.tape[i], self.device, self.run.move) for i in range(step * per, (step + 1) * per)]
        return list(map(self._cast_batch, batches))

    def _cast_batch(self, batch: Any) -> Any:
        return batch if self._cast_to is None else cast_floats(batch, self._cast_to)

    def _handed_out(self, item: Any) -> Any:
        item = self._cast_batch(item)
        self._drawn.append(item)
        return item

    def current_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (path, tensor) for the batches of the running step, with those that it has drawn itself."""
        for batch in (*self._batches, *self._drawn):
            yield from iter_tensors(batch)

    def step(self, index: int) -> StepOutcome:
        """Replay one optimizer step with the attached probes; raises UserCodeError if the user's code raised."""
        outcome = self.attempt(index)
        if self.raised is not None:
            raise self.raised
        return outcome

    def attempt(self, index: int) -> StepOutcome:
        """Like `step`, but if the user's code raises, return an outcome and store the exception in `raised`."""
        self.replays += 1
        self.replays_of[index] += 1
        self.micro_batch = 0
        self.events.clear()
        self.raised = None
        if self.told is not None:
            self.told()
        scale_before = self.events.scale()
        with self.events.watching():  # a scheduler steps only if an optimizer step was recorded
            loss = self._watched_step(index)
        events = tuple(self.events.events)
        asked = {event.optimizer for event in events if event.kind == "step"}
        stepped = [event.optimizer for event in events if event.kind == "optimizer_step"]
        if scale_before is not None and not self.makes_scalers:  # a step that starts a round may have reset its scaler
            asked_at = (event.scale for event in events if event.kind in ("unscale", "step", "update"))
            scale_before = next((scale for scale in asked_at if scale is not None), scale_before)
        alone = self.run.step is None and not self.optimizers and any(event.kind == "scale" for event in events)
        return StepOutcome(
            step=index,
            loss=None if self.raised is not None else loss_number(loss),
            scale_before=scale_before,
            scale_after=self.events.scale(),
            optimizer_steps=len(stepped),
            skipped=bool(asked - set(stepped)) or (alone and update_scaler_without_optimizer(self.model, self.scaler)),
            events=events,
            raised=None if self.raised is None else self.raised.raised,
        )

    def _watched_step(self, index: int) -> Any:
        """Run the step between the probes; returns its result, or the error that the user's code raised."""
        loss: Any = None
        running = False
        try:
            output = shown_once(self._shown, index) if self.precision is self._own_precision else prints_to_nobody()
            with self._surroundings(f"step {index}", output):
                self._drawn.clear()
                self._batches = self.batches_of(index)  # before the probes: the copying is not part of the user's step
                with ExitStack() as stack:
                    for probe in self._probes:
                        stack.enter_context(probe.during(index))
                    running = True
                    loss = self._run(index, self._batches)
                    if self.run.after_step is not None:
                        self.run.after_step(self.run, index)
        except UserCodeError as error:
            if not running:
                raise
            if error.__cause__ is not None:
                traceback.clear_frames(error.__cause__.__traceback__)  # its frames hold the step's activations
            self.raised = loss = error
        for probe in self._probes:
            probe.finish(index, loss)
        return loss

    @contextmanager
    def _surroundings(self, what: str, output: AbstractContextManager[None]) -> Iterator[None]:
        """Surround a step's user code: compiled parts run eagerly, precision is the session's; `output` may drop it."""
        with ExitStack() as stack:
            where = f", replayed in {self.precision.compute}," if self._overridden else ""
            stack.enter_context(self._user_code(f"{what}{where}"))
            stack.enter_context(output)
            stack.enter_context(self.precision.environment(self.device.type))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(no_anomaly_mode())
            stack.enter_context(no_fast_path())
            # TorchScript fuses a graph and its derivative after some runs: bits change, one node replaces many ops
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]  # not in __all__
            if self._wide_casts:
                stack.enter_context(WideNumbers())
                stack.enter_context(UpcastHalf())
            if self._overridden:
                stack.enter_context(AutocastOverride(self.precision.dtype if self.precision.reduced else None))
            yield

    def lead_up(self, steps: Iterable[EarlierStep]) -> None:
        """Run earlier steps (of the run's `lead_up`) again, in the training's own precision and without probes."""
        own: Any = self.run.precision
        kept = self.precision, self._overridden
        self.precision, self._overridden = replace(self.precision, compute=own), False
        try:
            for what, step in steps:
                with self._surroundings(what, prints_to_nobody()):
                    step(self.model, self.scaler)
        finally:
            self.precision, self._overridden = kept

    def _micro_batches(self, batches: list[Any]) -> Iterator[Any]:
        for self.micro_batch, batch in enumerate(batches):
            yield batch

    def _run(self, index: int, batches: list[Any]) -> Any:
        autocast = self.precision.context(self.device.type)
        if self.run.step is None:
            loss: Any = default_step(self.run, self._micro_batches(batches), self.optimizers, self.scaler, autocast)
        else:
            loss = call_user_step(
                self.run.step,
                {
                    "model": self.model,
                    "batch": batches[0],
                    "optimizer": as_given(self.run, self.optimizers),
                    "scaler": self.scaler,
                    "autocast": autocast,
                    "run": self.run,
                    "step": index,
                },
            )
        loss = readable_loss(loss)
        if any(event.kind == "optimizer_step" for event in self.events.events):
            for scheduler in self.schedulers:
                if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step()
                elif (metric := loss_number(loss)) is not None:  # a step without a loss has no metric for it
                    scheduler.step(metric)
        return loss

    # -- changes -------------------------------------------------------------------------------------------------

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Run the session in fp32, without autocast and loss scaling; the user's own casts to half stay wide too."""
        scale = self.events.scale()
        plain = replace(self.precision, compute="fp32", autocast=False, master_weights=False)
        with ExitStack() as stack:
            stack.enter_context(self._cast(torch.float32))
            stack.enter_context(as_plain_linears(self.model.modules()))
            stack.enter_context(self._with_precision(plain))
            stack.callback(setattr, self, "_wide_casts", self._wide_casts)
            self._wide_casts = True
            for parameter in self.model.parameters() if scale else ():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / (scale or 1.0)
            yield

    @contextmanager
    def computing_in(self, compute: str) -> Iterator[None]:
        """Compute in another format ("bf16", "fp32"): by autocast if the run uses it, else by casting the model."""
        other = replace(self.precision, compute=compute, master_weights=False)  # type: ignore[arg-type]
        with ExitStack() as stack:
            if not self.precision.autocast:
                stack.enter_context(self._cast(_torch_dtype(compute)))
                stack.callback(CastInputs(_torch_dtype(compute)).attach(self.model).remove)  # if the loss casts them
            stack.enter_context(self._with_precision(other))
            yield

    @contextmanager
    def keeping_master_weights(self) -> Iterator[None]:
        """Let the optimizers step fp32 copies of their half-precision parameters; frozen parameters are not copied."""
        if self.master_weights is not None:
            yield
            return
        names = self.parameter_names()
        with master_weights(self.optimizers.values()) as kept:
            self.master_weights = kept
            self._names_of_master_weights = {id(master): names[id(half)] for half, master in kept.pairs}
            try:
                yield
            finally:
                self.master_weights, self._names_of_master_weights = None, {}

    @contextmanager
    def _cast(self, dtype: torch.dtype) -> Iterator[None]:
        with ExitStack() as stack:
            own = [t for _, t in self.own_state() if t.dtype in REDUCED] if dtype is torch.float32 else []
            stack.enter_context(cast_model(self.model, dtype, self.optimizers.values()))
            stack.callback(
                TemporaryCast(own, dtype).restore
            )  # an average of weights in the run's own code is a copy of weights
            kept, self._cast_to = self._cast_to, dtype
            stack.callback(setattr, self, "_cast_to", kept)
            yield

    @contextmanager
    def _with_precision(self, precision: Precision) -> Iterator[None]:
        kept = self.precision, self._overridden
        self.precision, self._overridden = precision, True
        try:
            if precision.compute == "fp16":
                yield
            else:
                with self.scaling_with(torch.amp.GradScaler(self.device.type, enabled=False)):
                    yield
        finally:
            self.precision, self._overridden = kept

    @contextmanager
    def scaling_with(self, scaler: Any) -> Iterator[None]:
        """Give the run's scalers another one's settings and state, in place: a step may hold them in a closure."""
        settings = {key: value for key, value in vars(scaler).items() if not callable(value)}
        kept: dict[int, tuple[Any, dict[str, Any]]] = {}

        def adopt(other: Any) -> None:
            if id(other) not in kept:
                kept[id(other)] = (other, {key: value for key, value in vars(other).items() if key in settings})
                vars(other).update({key: copy.copy(value) for key, value in settings.items()})

        with ExitStack() as stack:
            stack.callback(lambda: [vars(other).update(before) for other, before in kept.values()])
            if not self._adopting:  # a scaler made inside adopts the outermost settings first: the innermost win
                stack.enter_context(on_scaler_call(self._adopt, disabled=True, methods=("scale",)))
            self._adopting.append(adopt)
            stack.callback(self._adopting.pop)
            adopt(self.scaler)
            yield

    def _adopt(self, scaler: Any, _method: str, _argument: Any, run: Callable[[], Any]) -> Any:
        for adopt in self._adopting:
            adopt(scaler)
        return run()


def _torch_dtype(compute: str) -> torch.dtype:
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(compute, torch.float32)
