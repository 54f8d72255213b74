"""`Alerting`: judges a run while it goes on, from its own log, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable

from ampdoctor.diagnosis.over_time.judge import Judge
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.run_log.lines import AlertLine, Line, Stamped
from ampdoctor.evidence.thresholds import Thresholds

OnAlert = Callable[[Finding], None]
_LOUD = ("error", "warning")


class Alerting:
    """Hears the lines of a log; what the judge finds becomes a line of it, a sentence, and a call of a user's function.

    Args:
        write: Takes a line for the log.
        say: Told an alert in a line; notes are in the log alone.
        thresholds: Those in force.
        on_alert: The user's own, told each alert, notes too; None for none. What it raises is said once, and it is
            called no more.

    Attributes:
        fired: The name of the last rule that fired loudly and that nobody has taken notice of yet.
    """

    def __init__(
        self,
        write: Callable[[Line], None],
        say: Callable[[str], None],
        thresholds: Thresholds,
        on_alert: OnAlert | None = None,
    ) -> None:
        self.fired: str | None = None
        self._judge = Judge(thresholds)
        self._write, self._say, self._on_alert = write, say, on_alert

    def hear(self, whole: Stamped) -> None:
        """Told of a line of the log."""
        for finding in self._judge.hear(whole.line):
            self._write(AlertLine(step=finding.where.step or 0, finding=finding))
            if finding.severity in _LOUD:
                self.fired = finding.name
                self._say(f"{finding.severity} {finding.code} at step {finding.where.step}: {finding.message}")
            self._tell(finding)

    def taken(self) -> str | None:
        """Returns the rule that has fired since this was last asked; None if none has."""
        fired, self.fired = self.fired, None
        return fired

    def _tell(self, finding: Finding) -> None:
        if self._on_alert is None:
            return
        try:
            self._on_alert(finding)
        except Exception as error:  # noqa: BLE001 - somebody else's function, on our thread
            self._on_alert = None
            self._say(f"on_alert is called no more: {type(error).__name__}: {error}")
