"""Weights & Biases: a run of its own in a project; its environment says whether online, offline or not at all."""

from __future__ import annotations

from collections.abc import Mapping

from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import Kind, RunFacts, text_of_alert, title_of

_LEVELS = {"error": "ERROR", "warning": "WARN"}
"""A note tells nobody anything at night."""


class Wandb:
    """Logs to a run that nothing else writes to: its steps are a number like others, since they may come again."""

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

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - it is sent now
        """As in `Sink`; it goes to who has asked W&B for alerts, by mail or Slack."""
        if finding.severity in _LEVELS:
            self._run.alert(title_of(finding), text_of_alert(finding, step), level=_LEVELS[finding.severity])

    def flush(self) -> None:
        """As in `Sink`; W&B sends by itself."""

    def close(self) -> None:
        """As in `Sink`."""
        self._run.finish()


KIND = Kind(
    name="wandb",
    target="PROJECT",
    help="A run of Weights & Biases; WANDB_MODE and the like are its own.",
    begin=Wandb,
    module="wandb",
    often=False,
)
