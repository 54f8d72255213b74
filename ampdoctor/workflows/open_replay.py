"""Opens a replay: the factory, the checkpoint and what it brings, and a check of the state before the first step."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.diagnosis.scan.scaler import FRESH_SCALER, wrong_settings
from ampdoctor.errors import FactoryError, ReplayError, UsageError
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.report import Finding, Skipped
from ampdoctor.evidence.report_scaler import ScalerArguments, ScalerSection
from ampdoctor.hooks.interfaces import is_out_of_memory
from ampdoctor.hooks.names import other_names, scripted_modules
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.package import working_folder
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.dtype_overrides import without_overrides
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda
from ampdoctor.precision.fake_gpu.processes import lasting_emulation
from ampdoctor.precision.fp16_matmul import half_products
from ampdoctor.precision.kernels import SharedOverlay, lends_kernels
from ampdoctor.precision.spec import torch_shims
from ampdoctor.probes.user_code import HalfMade, shown_from
from ampdoctor.replay.batches import DataPosition, loads_state
from ampdoctor.replay.bundles.read import Bundle, bundle_at
from ampdoctor.replay.frameworks.accelerate import own_state
from ampdoctor.replay.frameworks.lightning import one_device
from ampdoctor.replay.load_checkpoint import (
    ResumeReport,
    load_schedulers,
    not_restored,
    resume,
    scaler_state_of,
    set_generators,
)
from ampdoctor.replay.parts import choose_device
from ampdoctor.replay.scripts.script import Script
from ampdoctor.replay.session import Session
from ampdoctor.replay.snapshot import process_settings
from ampdoctor.replay.target import Target, load_target
from ampdoctor.replay.tensor_store import lies_in_memory
from ampdoctor.replay.training_run import takes_start
from ampdoctor.replay.user_code import out_of_memory
from ampdoctor.replay.user_files import CHANGES, audit_file_writes, changes_note
from ampdoctor.workflows.scan_log import LogBeside, log_beside

if TYPE_CHECKING:
    from ampdoctor.checkpoints.resume_state import ResumeState
    from ampdoctor.evidence.checkpoint_stats import ScalerState
    from ampdoctor.replay.training_run import TrainingRun
    from ampdoctor.workflows.requests import Policy, ReplayRequest


# -- the state of a resumed training beside its weights: place in the data, random numbers, schedule --


def begin_anew(session: Session, request: ReplayRequest, say: Callable[[str], None]) -> None:
    """Let the batches of a run without a checkpoint begin where the request says, before its first batch is drawn."""
    session.tape.place = DataPosition(batches=_passed_over(request, session, 0), epochs=request.until_sick, say=say)


def go_on(
    session: Session, request: ReplayRequest, step: int | None, standing: ResumeState, say: Callable[[str], None]
) -> Iterator[str]:
    """Let the run continue where its checkpoint was saved; yields what differs from the training, as clauses."""
    run = session.run
    unloaded = None if run.load is not None else load_schedulers(session.schedulers, standing.schedulers)
    asked = request.until_sick or request.skip_batches is not None
    if not (asked or takes_start(run.batches)):
        session.tape.place = DataPosition(say=say)
        return
    if unloaded is not None:
        yield f"the file {unloaded}"
    yield from not_restored(standing.random, session.device.type)
    if run.counters is not None:
        put = run.counters(standing.numbers)
        said = ", ".join(f"{name} = {value:g}" for name, value in put.items())
        rest = "what else the script counts begins as in a fresh run (where it can resume by itself: -- --resume ...)"
        yield f"{'of the script ' + said + ' are set; ' if put else ''}{rest}"
    if step is None and not isinstance(request.skip_batches, int):
        yield "the file says no step: the batches begin with the factory's first (--skip-batches N passes over some)"
    state = None
    if asked and not isinstance(request.skip_batches, int) and loads_state(run.batches):
        state = standing.loaders[0] if len(standing.loaders) == 1 else None
    session.tape.place = DataPosition(
        steps=step or 0,
        batches=_passed_over(request, session, step or 0),
        state=state,
        epochs=request.until_sick,
        arrive=partial(set_generators, standing.random),
        say=say,
    )


def _passed_over(request: ReplayRequest, session: Session, step: int) -> int:
    wanted = request.skip_batches
    if isinstance(wanted, int):
        if wanted and takes_start(session.run.batches):
            raise UsageError("--skip-batches: TrainingRun(batches=...) takes `start`, and finds its place by itself")
        return wanted
    return step * session.run.accumulation_steps if wanted == "checkpoint" or request.until_sick else 0


# -- opening: the factory, the checkpoint, the device, CUDA's casts --

_AS_ON_A_GPU = "replayed with CUDA's autocast, as on a GPU; --policy native replays the CPU's own"
"""Said where the script's own autocast is the CPU's."""
SEED = 0
"""Seeds torch, numpy and Python before the factory's module is imported and before each call of the factory."""


@dataclass(slots=True)
class OpenReplay:
    """A replay that is ready: makes fresh sessions, and keeps what a report must say about them."""

    request: ReplayRequest
    device: torch.device
    factory: Target
    policy: Policy = "cuda"  # autocast policy of a CPU replay
    resumed: ResumeReport | None = None  # the result of loading the checkpoint
    log: LogBeside | None = None  # beside the checkpoint
    saved_loss: float | None = None  # with the checkpoint
    scanned: tuple[Finding, ...] = ()  # what scan says of the state before the first step
    notes: list[str] = field(default_factory=list)  # what differs from the failed run, or is invisible
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a module or tensor with several
    half_made: HalfMade = field(default_factory=HalfMade)  # where the run's code makes parameters in float16
    detour: SharedOverlay | None = None  # fp16 products that run through fp32 kernels
    scaler: ScalerState | None = None  # the run's enabled loss scaler before step 0
    first_step: int | None = None  # the training's number of a recorded step
    finite_again: str | None = None  # a recorded step was sick in its loop, and finite when replayed there
    _not_as_it_was: tuple[str, ...] = ()

    def session(self) -> Session:
        """Returns a fresh run from the factory, with the checkpoint loaded."""
        request = self.request
        seed_all()
        run = self.factory.make(request.arguments, batches=request.batches, loss=request.loss)
        if isinstance(self.factory, Script) and self.device.type == "cuda":
            _require_on_gpu(self.factory.name, run)
        session = Session(
            run,
            device=self.device,
            precision=request.precision,
            user_code=self._user_code,
            spill=self._spill_folder(),
            shown=request.shown,
        )
        try:
            self._load(run, session)
            self.scaler = scaler_state_of(session.scaler)
        except BaseException:
            session.close()
            raise
        return session

    @contextmanager
    def _user_code(self, what: str) -> Iterator[None]:
        """Runs user code as the factory does; the first change to the user's files is allowed, and becomes a note."""

        def note(did: str, _place: Path) -> None:
            if not any(said.startswith(CHANGES) for said in self.notes):
                self.notes.append(changes_note(did, self.factory.instead))

        with audit_file_writes((working_folder(), *self.factory.path), note), self.factory.user_code(what):
            yield

    def _spill_folder(self) -> Path | None:
        if not self.request.spill:
            return None
        try:
            folder = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise ReplayError(f"--spill: {error.strerror}") from None
        if lies_in_memory(folder):
            self.notes.append(f"--spill saves nothing in {folder}, which is kept in memory: let TMPDIR name another")
        return folder

    def _load(self, run: TrainingRun, session: Session) -> None:
        request = self.request
        if request.checkpoint is not None:
            state = load_state(request.checkpoint)
            if self.resumed is None:
                self.saved_loss, (self.log, _) = state.loss, log_beside(state.folders, request.thresholds)
            self.resumed = resume(
                run,
                session.optimizers,
                session.scaler,
                state,
                allow_partial=request.allow_partial,
                fresh_scaler=request.fresh_scaler,
            )
            session.state_loaded()
            if run.lead_up is not None:
                session.lead_up(run.lead_up(self.resumed.loaded, self.notes.append))
            step = self.resumed.global_step
            self._not_as_it_was = tuple(go_on(session, request, step, state.standing, self.notes.append))
        else:
            begin_anew(session, request, self.notes.append)
        self.notes += run.notes
        if self._names_the_cpu and self.device.type == "cpu" and self.policy == "cuda":
            self.notes.append(_AS_ON_A_GPU)
        self.first_step = run.first_step
        self.finite_again = run.finite_again
        self.other_names = other_names(session.model)
        self.notes += (
            f"{name or 'the model'} is scripted: its ops are seen, its submodules and source lines are not"
            for name in scripted_modules(session.model)
        )

    def left_out(self) -> tuple[Skipped, ...]:
        """Returns what was missing from the checkpoint, did not fit, or was changed while it was loaded."""
        if self.resumed is None:
            return ()
        resumed, where = self.resumed, f"checkpoint {self.request.checkpoint}"
        reasons = [f"the file holds no {part}" for part in resumed.lacks]
        for what, names in (
            ("missing from the file", resumed.missing),
            ("in the file but not in the model", resumed.unexpected),
            ("of another shape", resumed.mismatched),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                reasons.append(f"{what}: {', '.join(names[:3])}{more}")
        reasons += self._not_as_it_was
        return tuple(Skipped(what=where, reason=reason) for reason in (*reasons, *resumed.notes))

    @property
    def global_step(self) -> int | None:
        """Number of the replay's step 0 in the training: from the run, else from the checkpoint; None if unknown."""
        if self.first_step is not None:
            return self.first_step
        return None if self.resumed is None else self.resumed.global_step

    def located(self, finding: Finding) -> Finding:
        """Returns the finding with the training's step beside the replay's, and with every other name."""
        finding = self._with_other_names(finding)
        if self.global_step is None or finding.where.step is None:
            return finding
        where = replace(finding.where, global_step=self.global_step + finding.where.step)
        return replace(finding, where=where)

    def _with_other_names(self, finding: Finding) -> Finding:
        operands = [(operand["name"] or "").partition(":")[2] for operand in finding.evidence.get("inputs", ())]
        named = [finding.where.module, finding.where.tensor or "", *operands]
        others = {name: list(self.other_names[name]) for name in named if name in self.other_names}
        return replace(finding, evidence={**finding.evidence, "also_named": others}) if others else finding

    @property
    def _names_the_cpu(self) -> bool:
        """Whether the autocast of the user's script is the CPU's, whatever list of ops the replay follows."""
        return isinstance(self.factory, Script) and self.factory.autocast_on == "cpu"

    def described(self, session: Session, steps: int) -> Mapping[str, Any]:
        """Returns the report's `run` section."""
        return {
            "device": str(self.device),
            "policy": self.policy if self.device.type == "cpu" else "native",
            "precision": session.precision.compute,
            "autocast": session.precision.autocast,
            "steps": steps,
            "replays": session.replays,
            "torch": torch.__version__,
            **({"autocast_on": "cpu"} if self._names_the_cpu else {}),
            **({"half_products": "fp32"} if self.detour is not None and self.detour.used else {}),
            **({"torch_shims": list(shims)} if (shims := torch_shims()) else {}),
            "threads": torch.get_num_threads(),
            "notes": list(dict.fromkeys(self.notes)),
        }


@contextmanager
def open_replay(request: ReplayRequest) -> Iterator[OpenReplay]:
    """Set up everything that a replay needs; afterwards the process is as before."""
    usual = _usual_policy(request)
    policy = request.policy or usual
    device = choose_device(request.device)
    before = RandomState.capture()
    plain = device.type == "cpu" and request.half_products == "plain"
    notes = ["fp16 products run through the CPU's own kernels (--threshold half-products=plain)"] if plain else []
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # the caller may be in inference mode
        stack.enter_context(torch.enable_grad())
        stack.enter_context(without_overrides())
        stack.enter_context(own_state())
        stack.callback(before.restore)
        stack.callback(process_settings())
        stack.enter_context(lasting_emulation())
        stack.enter_context(shown_from(working_folder()))
        half_made = HalfMade()
        stack.enter_context(half_made.recording())
        stack.callback(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        casts = stack.enter_context(autocast_policy(policy)) if device.type == "cpu" else None
        detour = stack.enter_context(half_products()) if _detours(request, policy, device) else None
        seed_all()
        emulated = device.type == "cpu" and not torch.cuda.is_available()
        environment = _emulated_cuda(notes, reports_cuda=policy == "cuda") if emulated else nullcontext
        if request.until_sick:  # for thousands of steps, patch once instead of around each
            stack.enter_context(environment())
        factory = load_target(
            request.factory,
            request.app_dir,
            environment=environment,
            script_arguments=request.script_arguments,
            notes=notes,
            model=request.model,
            shown=request.shown,
        )
        replay = OpenReplay(request, device, factory, policy, notes=notes, half_made=half_made, detour=detour)
        try:
            yield replay
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory("the replay", error) from None
        if casts is not None:
            notes.extend(casts.notes)


def _require_on_gpu(name: str, run: TrainingRun) -> None:
    """Raises FactoryError where a script trains on the CPU: it places its model itself, and no replay moves it."""
    parameters = list(run.model.parameters())
    if parameters and not any(parameter.is_cuda for parameter in parameters):
        raise FactoryError(f"{name} trains on the CPU, and --device auto takes this machine's GPU: give --device cpu")


def _usual_policy(request: ReplayRequest) -> Policy:
    """Returns the policy of the device on which a bundle was recorded; everything else was made for a GPU."""
    if not isinstance(request.factory, str) or bundle_at(request.factory) is None:
        return "cuda"
    bundle = Bundle(request.factory)
    if bundle.needs_checkpoint and request.checkpoint is None:
        raise ReplayError(
            f"{bundle.name} was written without the parameters, {bundle.lacks}: give a checkpoint of the training from "
            f"before step {bundle.step} with --checkpoint"
        )
    return bundle.policy


def _detours(request: ReplayRequest, policy: Policy, device: torch.device) -> bool:
    asked = policy == "cuda" and request.half_products == "fp32"
    return asked and device.type == "cpu" and lends_kernels()


def _emulated_cuda(notes: list[str], *, reports_cuda: bool) -> Callable[[], AbstractContextManager[None]]:
    """Returns a CUDA emulation for each piece of user code; what it had to pretend is added to `notes`."""

    @contextmanager
    def environment() -> Iterator[None]:
        with emulate_cuda(reports_cuda=reports_cuda) as emulation, one_device(notes.append, pretended=reports_cuda):
            try:
                yield
            finally:
                notes.extend(note for note in emulation.notes if note not in notes)

    return environment


def seed_all() -> None:
    """Seed each fresh run with the same random numbers, even if the factory seeds nothing itself."""
    import numpy as np

    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the global generator is what user code draws from
    torch.manual_seed(SEED)


# -- the scaler after the last step --


def scaler_after(session: Session, findings: Sequence[Finding]) -> ScalerSection | None:
    """Returns the report's `scaler` section: the scaler after the replay, and what a verified prescription changes."""
    if not session.events.enabled:
        return None
    state = session.scaler.state_dict()
    current = {key: value for key, value in state.items() if not key.startswith("_")}
    cures = [f.prescription for f in findings if f.prescription is not None and f.prescription.verified]
    scales = [
        cure.value["init_scale"] if cure.kind == "scaler" else cure.value
        for cure in cures
        if cure.kind in ("init_scale", "scaler")
    ]
    own = scaler_state_of(session.scaler)
    sound = {name: FRESH_SCALER[name] for name in wrong_settings(own) if name in current} if own is not None else {}
    settings = {key: value for key, value in current.items() if key != "scale"} | sound
    recommended = from_plain(ScalerArguments, {**settings, "init_scale": scales[0]}) if scales else None
    return ScalerSection(current=current, recommended=recommended, change=recommended is not None)
