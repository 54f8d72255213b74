"""trackio: a run in a project, on this machine or in a Space."""

from __future__ import annotations

from collections.abc import Mapping

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import RunFacts, SinkType, text_of_alert, title_of


class Trackio:
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

    def flush(self) -> None:
        """As in `Sink`; trackio sends by itself."""

    def close(self) -> None:
        """As in `Sink`."""
        self._run.finish()


KIND = SinkType(
    name="trackio",
    target="PROJECT",
    help="A run of trackio; TRACKIO_SPACE_ID and the like are its own.",
    begin=Trackio,
    module="trackio",
    often=False,
)
