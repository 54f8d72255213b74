"""The request to a watch over a training that runs once: what `ampdoctor run` asks for.

No torch here: the command line imports this file before it knows what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ampdoctor.errors import UsageError
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.sinks.sink import Sink
from ampdoctor.health.sinks.table import Export
from ampdoctor.workflows.opening.outputs import refuse_of_log

OnSick = Literal["record", "stop"]
Look = Literal["auto", "sync", "off"]

USUAL_EVERY = 100
"""Steps from one close measurement to the next."""
USUAL_BUNDLE_BYTES = 4_000_000_000
"""The most that a bundle takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """What to watch, and what to do where it falls sick.

    Attributes:
        health: Folder of the log and the bundles, absolute; it need not exist yet.
        named: The same as it was typed, for whoever reads of it; "" for as it is.
        script: What trains, as it was typed: a script's path, or a module's name.
        is_module: It is a module's name.
        arguments: What follows it in `sys.argv`.
        command: The whole command line, the interpreter's own options left out.
        every: Steps from one close measurement to the next.
        on_sick: `record`: look, log, keep a bundle, and let the training go on. `stop`: the same, then raise
            `errors.StoppedError` into the loop.
        look: `auto`: look before the update wherever that costs no synchronisation of the device. `sync`: everywhere,
            at the price of one a step. `off`: never run a step again.
        guard: Let a fused optimizer hold a sick update back on the device.
        bundle: Keep a bundle of the first sick step.
        bundle_max: The most bytes that a bundle takes, and what is kept for one by `record_batches`.
        record_batches: Of how many of the last updates the batches are kept behind them, where a sick step is known
            only after its update; 0 for none.
        export: Where the log's numbers and alerts go while the training runs.
        thresholds: What counts as lost, as harmful, as too many.

    Raises:
        UsageError: A number is too small, `on_sick` or `look` is none of the above, or an export would write over the
            log.
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
    thresholds: Thresholds = DEFAULT_THRESHOLDS

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"every is {self.every}: a measurement comes each step at most")
        if self.on_sick not in get_args(OnSick):
            raise UsageError(f"on_sick {self.on_sick!r} is neither record nor stop")
        if self.look not in get_args(Look):
            raise UsageError(f"look {self.look!r} is none of auto, sync, off")
        if self.on_sick == "stop" and self.look == "off":
            raise UsageError("on_sick stop ends the training after a look, and look off never looks: give one of them")
        if self.bundle_max < 1:
            raise UsageError(f"bundle_max is {self.bundle_max} bytes: a bundle that takes nothing is bundle=False")
        if self.record_batches < 0:
            raise UsageError(f"record_batches is {self.record_batches}: it counts updates, and 0 keeps none")
        for one in self.export:
            for file in one.files(Path(self.health).name) if isinstance(one, Export) else ():
                refuse_of_log(file, self.health)
