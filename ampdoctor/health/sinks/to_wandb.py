"""Weights & Biases and trackio, which has its interface: a new run in a project.

Their environment variables decide between online, offline and disabled, and between this machine and a Space.
"""

from __future__ import annotations

from collections.abc import Mapping

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import RunFacts, SinkType, text_of_alert, title_of

_LEVELS = {"error": "ERROR", "warning": "WARN"}  # notes send no alert


class Wandb:
    """Logs to a run of its own. Its steps are logged as a metric, since they may repeat."""

    def __init__(self, project: str, facts: RunFacts) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=facts.name,
            config=facts.as_config(),
            job_type=PREFIX,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
        )
        self._run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """As in `Sink`; one row."""
        row = {f"{PREFIX}/{name}": value for name, value in metrics.items()}
        self._run.log({**row, f"{PREFIX}/step": step, "_timestamp": time_ms / 1000})

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - W&B sends it at once
        """As in `Sink`; W&B sends it to subscribers by mail or Slack."""
        if finding.severity in _LEVELS:
            self._run.alert(title_of(finding), text_of_alert(finding, step), level=_LEVELS[finding.severity])

    def flush(self) -> None:
        """As in `Sink`; the library sends by itself."""

    def close(self) -> None:
        """As in `Sink`."""
        self._run.finish()


class Trackio(Wandb):
    """Logs to a run of its own, without hardware metrics: reading them would begin to use the hardware."""

    def __init__(self, project: str, facts: RunFacts) -> None:
        import trackio

        self._levels = {"error": trackio.AlertLevel.ERROR, "warning": trackio.AlertLevel.WARN}
        self._run = trackio.init(
            project, facts.name, config=facts.as_config(), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:  # noqa: ARG002 - it takes no time
        """As in `Sink`; the time is that of arrival."""
        self._run.log({f"{PREFIX}/{name}": value for name, value in metrics.items()}, step=step)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - the same
        """As in `Sink`; notes are not sent."""
        if finding.severity in self._levels:
            level = self._levels[finding.severity]
            self._run.alert(title_of(finding), text_of_alert(finding, step), level, step=step)


KIND = SinkType(
    name="wandb",
    target="PROJECT",
    help="A run of Weights & Biases; WANDB_MODE and the like are its own.",
    begin=Wandb,
    module="wandb",
    often=False,
)
TRACKIO = SinkType(
    name="trackio",
    target="PROJECT",
    help="A run of trackio; TRACKIO_SPACE_ID and the like are its own.",
    begin=Trackio,
    module="trackio",
    often=False,
)
