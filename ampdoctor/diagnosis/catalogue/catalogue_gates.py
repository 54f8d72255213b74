"""Pages of the rules on the configuration: ignores that have outlived their use."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

GATE_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP911",
        name="unused-ignore",
        title="An ignore of the configuration fits nothing that was found",
        worst="warning",
        meaning=(
            "The finding that the ignore was written for is gone, or it has another name now. What is left would hide "
            "the next finding that happens to fit it, and nobody would see it come."
        ),
        decided=(
            "After everything was examined, no finding fitted the entry. Because many commands and checkpoints share "
            "one configuration, it is only said where this run could have used it: the rule is one that this command "
            "always looks for (AMP1xx, 4xx, 5xx and 7xx: scan; AMP2xx and what only a replay shows: bisect-nan and "
            "recommend; AMP3xx and other ranges: profile and recommend), the report is complete and has a verdict, and "
            "a file that the entry names is one of those that were examined."
        ),
        threshold="None: one finding that fits is use enough.",
        action=(
            "Take the entry out. Where it belongs to another checkpoint or run than this one, give it that one's "
            "`file`, and this one keeps silent."
        ),
        wrong=(
            "An entry without `file` is called unused by a scan of a checkpoint that it was not written for. A scan of "
            "a folder of many examines only what its search needs, and a replay only its first steps: what the entry "
            "fits may lie in the rest. An entry for the checkpoint's own rules is never called unused by a replay."
        ),
    ),
    Rule(
        code="AMP912",
        name="expired-ignore",
        title="An ignore of the configuration is past its date",
        worst="warning",
        meaning="The day until which the finding was to be lived with has passed: the ignore sets it aside no longer.",
        decided=(
            "A finding fits the entry, and today (UTC) is later than the day in its `expires`. On that day the entry "
            "still holds."
        ),
        threshold="The date that the entry gives.",
        action="Mend the finding, or decide anew and give the entry a new date.",
        wrong=(
            "It goes by the clock of the machine. An expired entry that fits nothing is not called expired but unused "
            "(AMP911), where that can be said."
        ),
    ),
)
