"""`ampdoctor plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typer import Argument, Option

from ampdoctor.batching.plans import BatchSettings, Cluster, Memory, PlanRequest, States, per_sample_of_peak
from ampdoctor.cli.options import GateOptions, OutputOptions, flatten
from ampdoctor.cli.process import loading, read_text
from ampdoctor.cli.run_command import Action, run_command
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.targets import PlanFramework
from ampdoctor.workflows.requests import Precision, Progress, SetAside

# -- devices and numbers as people type them: `512`, `64x8`; `7e9`, `7B`, `350M` --

_DEVICES = re.compile(r"(?P<first>\d{1,9})(x(?P<each>\d{1,9}))?", re.ASCII)
_NUMBER = re.compile(r"(?P<number>\d{1,15}(\.\d{1,6})?(e\d{1,2})?)(?P<unit>[kmbt]?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


def devices_of(option: str, text: str) -> int:
    """Return the number of devices; may raise UsageError."""
    found = _DEVICES.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} {text}: devices are a number, or nodes x devices of a node, as in 512 or 64x8")
    devices = int(found["first"]) * int(found["each"] or 1)
    if devices < 1:
        raise UsageError(f"{option} {text}: a job needs at least 1 device")
    return devices


def parameters_of(option: str, text: str) -> float:
    """Return the number of parameters; raises UsageError where it is invalid or less than 1."""
    found = _NUMBER.fullmatch(text.strip())
    number = 0.0 if found is None else float(found["number"]) * 10 ** _POWERS[found["unit"].lower()]
    if number < 1:
        raise UsageError(f"{option} {text}: parameters are a number, as in 7e9, 7B or 350M")
    return number


def bytes_each_of(option: str, text: str) -> tuple[float, float, float]:
    """Return the bytes of a parameter's weight, gradient and optimizer states; raises UsageError for other texts."""
    try:
        weight, gradient, moments = (float(part) for part in text.split(","))
    except ValueError:
        said = "bytes of a parameter's weight, gradient and optimizer states, as in 2,2,12"
        raise UsageError(f"{option} {text}: {said}") from None
    return weight, gradient, moments


# -- sizes as people type them: `512MB`, `4GB`, `1.5GiB`, `2g` --

_SIZE = re.compile(r"(?P<number>\d{1,12}(\.\d{1,6})?) ?(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.ASCII | re.IGNORECASE)
_BYTE_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(option: str, text: str) -> int:
    """Return a size in bytes: units are powers of 1000, with an `i` powers of 1024; may raise UsageError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found["binary"] and not found["unit"]):
        raise UsageError(f"{option} {text}: a size is a number with its unit, as in 512MB or 4GB")
    size = int(float(found["number"]) * (1024 if found["binary"] else 1000) ** _BYTE_POWERS[found["unit"].lower()])
    if size < 1:
        raise UsageError(f"{option} {text}: that is not one byte")
    return size


def _size(option: str, text: str | None) -> float | None:
    return None if text is None else float(bytes_of(option, text))


# -- options --

_SIZES = ("tensor", "pipeline", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The batch and the devices in force, those to plan for, what fits, and what is wanted of the plan."""

    all_have: ClassVar[Mapping[str, Any]] = {"allow_from_autoenv": False}  # they describe one job

    # the current batch, and facts about the job
    global_batch: Annotated[int | None, Option(metavar="N", help="Samples of an optimizer step, which stay.")] = None
    micro_batch: Annotated[int | None, Option(metavar="N", help="Samples a rank runs at once, in force.")] = None
    accumulation: Annotated[int | None, Option(metavar="N", help="Micro-batches before a step, in force.")] = None
    reduction: Annotated[
        Literal["mean", "sum", "tokens", "step"] | None,
        Option(
            help="The loss: a mean over the micro-batch; a sum; a mean over the step's tokens, where ranks are "
            "averaged (tokens) or added up (step)."
        ),
    ] = None
    precision: Annotated[Precision | None, Option(help="Of the job [default: fp16].")] = None
    reduce_fp16: Annotated[
        Literal["before", "after", "split", "none"] | None,
        Option(help="When the fp16 reduce divides: before or after its sum, or both; none: it is not fp16."),
    ] = None

    # the devices before and after
    gpus: Annotated[
        str | None, Option(metavar="N", help="Devices of the job in force: 512, or nodes x each, 64x8.")
    ] = None
    to_gpus: Annotated[str | None, Option(metavar="N", help="Devices to plan for [default: as --gpus].")] = None
    tensor: Annotated[int | None, Option("--tp", metavar="N", min=1, help="Tensor parallel size.")] = None
    pipeline: Annotated[int | None, Option("--pp", metavar="N", min=1, help="Pipeline parallel size.")] = None
    context: Annotated[int | None, Option("--cp", metavar="N", min=1, help="Context parallel size.")] = None
    to_tensor: Annotated[int | None, Option("--to-tp", metavar="N", min=1, help="Afterwards [default: --tp].")] = None
    to_pipeline: Annotated[int | None, Option("--to-pp", metavar="N", min=1, help="Afterwards [default: --pp].")] = None
    to_context: Annotated[int | None, Option("--to-cp", metavar="N", min=1, help="Afterwards [default: --cp].")] = None

    # how much fits on a device
    max_micro_batch: Annotated[
        int | None, Option(metavar="N", min=1, help="The largest micro-batch that fits a device now.")
    ] = None
    device_memory: Annotated[str | None, Option(metavar="SIZE", help="Memory of a device, as in 80GB.")] = None
    memory_per_sample: Annotated[
        str | None, Option(metavar="SIZE", help="What one more sample of a micro-batch takes.")
    ] = None
    peak_memory: Annotated[
        str | None, Option(metavar="SIZE", help="Measured in the job in force: gives what a sample takes.")
    ] = None
    params: Annotated[str | None, Option(metavar="N", help="Parameters of the model, as in 7B: sizes its states.")] = (
        None
    )
    shard_stage: Annotated[int | None, Option(metavar="N", help="0 DDP, 1 to 3 ZeRO; 3 also FSDP [default: 0].")] = None
    state_bytes: Annotated[
        str,
        Option(
            metavar="W,G,O",
            help="Bytes of a parameter's weight, gradient and optimizer states; autocast with Adam: 4,4,8.",
        ),
    ] = "2,2,12"

    profile: Annotated[
        str | None, Option(metavar="FILE", help="Of `profile --save`, or a log: what fp16 flushes before and after.")
    ] = None
    emit: Annotated[PlanFramework | None, Option(help="Print the plan in this framework's own words.")] = None

    def _said(self, read: BatchSettings) -> BatchSettings:
        """Return the settings of the configuration file, overridden by the command line."""
        names = ("global_batch", "micro_batch", "accumulation", "reduction", "precision")
        given: dict[str, Any] = {**{name: getattr(self, name) for name in names}, "division": self.reduce_fp16}
        return replace(read, **{name: value for name, value in given.items() if value is not None})

    def _clusters(self, said: BatchSettings) -> tuple[Cluster | None, Cluster]:
        """Return the current cluster, where there is one, and the one to plan for; may raise UsageError."""
        sizes = {name: getattr(self, name) or getattr(said, name) or 1 for name in _SIZES}
        then = {name: getattr(self, f"to_{name}") or sizes[name] for name in _SIZES}
        now = said.devices if self.gpus is None else devices_of("--gpus", self.gpus)
        after = now if self.to_gpus is None else devices_of("--to-gpus", self.to_gpus)
        if after is None:
            raise UsageError("no devices are named: --to-gpus says how many there will be, --gpus how many there are")
        return None if now is None else Cluster(devices=now, **sizes), Cluster(devices=after, **then)

    def _memory(self, said: BatchSettings, before: Cluster | None) -> Memory:
        """Return the known figures; raises UsageError where a size is invalid, or figures contradict each other."""
        states = self._states(said)
        per_sample = _size("--memory-per-sample", self.memory_per_sample)
        device = _size("--device-memory", self.device_memory)
        if self.peak_memory is not None and per_sample is not None:
            raise UsageError("--peak-memory and --memory-per-sample both say what a sample takes: give one")
        peak = said.peak_memory if self.peak_memory is None else bytes_of("--peak-memory", self.peak_memory)
        if peak is not None and per_sample is None and (self.peak_memory is not None or device is not None):
            if before is None or said.micro_batch is None:
                raise UsageError("a peak memory is of the job in force: --gpus and --micro-batch say which that is")
            per_sample = per_sample_of_peak(peak, said.micro_batch, states, before)
        if device is not None and per_sample is None and self.max_micro_batch is None:
            raise UsageError("--device-memory says what fits beside --memory-per-sample or --peak-memory alone")
        return Memory(per_sample=per_sample, device=device, states=states, known_to_fit=self.max_micro_batch)

    def _states(self, said: BatchSettings) -> States | None:
        stage = said.shard_stage if self.shard_stage is None else self.shard_stage
        if self.params is None:
            if self.shard_stage is not None:
                raise UsageError("--shard-stage says how states are cut, and --params how large they are: give both")
            return None
        return States(
            parameters=parameters_of("--params", self.params),
            stage=stage or 0,
            bytes_each=bytes_each_of("--state-bytes", self.state_bytes),
        )

    def request(self, read: BatchSettings, config: str | None) -> PlanRequest:
        """Return the request for the workflow; `read` holds the settings of the file `config`."""
        said = self._said(read)
        before, after = self._clusters(said)
        asked: dict[str, Any] = {"emit": self.emit, "profile": self.profile, "config": config}
        return PlanRequest(said=said, before=before, after=after, memory=self._memory(said, before), **asked)


_MAX_BYTES = 1 << 20  # limit for a configuration file; they have some kilobytes


@flatten
def plan(
    settings: Annotated[
        str | None,
        Argument(
            metavar="CONFIG",
            help="What is in force: a DeepSpeed JSON, Megatron-LM's arguments, Trainer arguments as JSON or YAML, an "
            "Accelerate YAML, or the folder of a watched run's log. Options stand in its place.",
        ),
    ] = None,
    *,
    wanted: PlanOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Keep the global batch on another number of devices.

    Which micro-batch and accumulation give it exactly, what fits, and what that changes: above all what fp16 gradients
    feel. Exit code 0 where an exact plan fits, 1 where there are only near ones.
    """

    def work(_: Progress | None, __: SetAside) -> Report:
        with loading():
            from ampdoctor.batching.config_files import read_settings
            from ampdoctor.workflows import plan as workflow

        read = BatchSettings()
        if settings is not None and Path(settings).is_dir():
            read = workflow.batch_of_log(settings)
        elif settings is not None:
            read = read_settings(read_text(settings, limit=_MAX_BYTES, what="the configuration"), settings)
        return workflow.plan(wanted.request(read, settings))

    files = [file for file in (settings, wanted.profile) if file is not None]
    return partial(run_command, work, output, gates, files)
