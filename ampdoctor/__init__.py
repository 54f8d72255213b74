"""ampdoctor: the doctor for mixed-precision training.

The names below are loaded on first use, so that `import ampdoctor` costs milliseconds and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ampdoctor import evidence

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Report
    from ampdoctor.hooks.interfaces import steps
    from ampdoctor.replay.training_run import TrainingRun
    from ampdoctor.training.apply import apply
    from ampdoctor.training.elastic_batch import elastic_batch
    from ampdoctor.workflows.bisect_nan import bisect_nan
    from ampdoctor.workflows.profile import profile
    from ampdoctor.workflows.recommend import recommend
    from ampdoctor.workflows.requests import ReplayRequest
    from ampdoctor.workflows.scan import scan, scan_several
    from ampdoctor.workflows.scan_against import compare
    from ampdoctor.workflows.watch import watch

    __version__: str

__all__ = [
    "ReplayRequest",
    "TrainingRun",
    "__version__",
    "apply",
    "bisect_nan",
    "compare",
    "elastic_batch",
    "profile",
    "recommend",
    "scan",
    "scan_several",
    "steps",
    "watch",
]

_HOME = {
    "ReplayRequest": "ampdoctor.workflows.requests",
    "TrainingRun": "ampdoctor.replay.training_run",
    "apply": "ampdoctor.training.apply",
    "bisect_nan": "ampdoctor.workflows.bisect_nan",
    "compare": "ampdoctor.workflows.scan_against",
    "elastic_batch": "ampdoctor.training.elastic_batch",
    "profile": "ampdoctor.workflows.profile",
    "recommend": "ampdoctor.workflows.recommend",
    "scan": "ampdoctor.workflows.scan",
    "scan_several": "ampdoctor.workflows.scan",
    "steps": "ampdoctor.hooks.interfaces",
    "watch": "ampdoctor.workflows.watch",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ampdoctor.package import version

        value: Any = version()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'ampdoctor' has no attribute {name!r}")
    globals()[name] = value
    return value


def _show_in_notebook(report: Report) -> str:
    from ampdoctor.reports.html_report import render_fragment

    return render_fragment(report)


evidence.show_in_notebook = _show_in_notebook


def __dir__() -> list[str]:
    return sorted(__all__)
