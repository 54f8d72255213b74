"""Who takes part in the comparison."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from benchmarks.peers.answer import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender.

    Attributes:
        title: Its row's name.
        adapter: `module:function` below `benchmarks.peers`: a `Tool`.
        package: The distribution whose version is shown; None where there is nothing to install.
        imports: What is imported before the clock starts, so that no case pays for it.
        own: Runs in this project's environment and not in the peers'.
    """

    title: str
    adapter: str
    package: str | None = None
    imports: tuple[str, ...] = ()
    own: bool = False

    def load(self) -> Tool:
        """Import the tool.

        Raises:
            ImportError: It is not installed, or does not run here.
        """
        for name in self.imports:
            importlib.import_module(name)
        module, _, function = self.adapter.partition(":")
        return cast("Tool", getattr(importlib.import_module(f"benchmarks.peers.{module}"), function))

    def version(self) -> str:
        """Return the installed version; "" where there is none to name."""
        try:
            return metadata.version(self.package) if self.package else ""
        except metadata.PackageNotFoundError:
            return ""


TOOLS = {
    "ampdoctor": Entry(
        title="**ampdoctor** bisect-nan",
        adapter="ampdoctor_bisect:bisect_nan",
        imports=("ampdoctor.workflows.bisect_nan",),
        own=True,
    ),
    "msprobe": Entry(
        title="msprobe overflow_check",
        adapter="msprobe_overflow:overflow_check",
        package="mindstudio-probe",
        imports=("msprobe.pytorch", "msprobe.overflow_check.analyzer"),
    ),
    "isfinite": Entry(
        title="dispatch mode, isfinite of every op, with a module stack, by hand",
        adapter="op_modes:isfinite_of_every_op",
    ),
    "isnan": Entry(
        title="dispatch mode, isnan of every op, with a module stack, by hand", adapter="op_modes:isnan_of_every_op"
    ),
    "sherlorch": Entry(title="sherlorch", adapter="sherlorch_trace:trace", package="sherlorch", imports=("sherlorch",)),
    "fairseq": Entry(
        title="fairseq NanDetector (0.12.2, that file alone)",
        adapter="fairseq_detector:nan_detector",
        imports=("fairseq_nan_detector",),
    ),
    "transformers": Entry(
        title="transformers DebugUnderflowOverflow",
        adapter="transformers_hooks:debug_underflow_overflow",
        package="transformers",
        imports=("transformers.debug_utils",),
    ),
    "anomaly": Entry(title="torch detect_anomaly", adapter="anomaly:detect_anomaly", package="torch"),
    "tracetorch": Entry(
        title="tracetorch-ml, critical only",
        adapter="tracetorch_session:trace_session",
        package="tracetorch-ml",
        imports=("tracetorch",),
    ),
    "stabilityguard": Entry(
        title="stabilityguard",
        adapter="stabilityguard_optimizer:guarded_optimizer",
        package="stabilityguard",
        imports=("stabilityguard", "stabilityguard.precision"),
    ),
    "by_hand": Entry(title="loss and gradients, by hand", adapter="by_hand:loss_and_gradients"),
}
"""By the name that the command line takes."""
