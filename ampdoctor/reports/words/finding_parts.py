"""Splits a finding into the texts that a page shows: what, where, why, what to change, proof, lines to paste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.reports.words import words
from ampdoctor.reports.words.paste import Setting, code_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A prescription in words.

    Attributes:
        label: `change`, or `advice` if only the author of the code can follow it.
        text: What to change.
        status: The result of its replay, in a word.
        proof: The same in a sentence.
        blocks: Lines to paste, by what they need.
    """

    label: str
    text: str
    status: str
    proof: str
    blocks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingParts:
    """A finding in words; the texts have to be made inert before they are shown.

    Attributes:
        finding: The finding.
        place: Its address in a line.
        why: Its cause and what moved first, as far as they are known; each a line.
        figures: Name and value of each number of its evidence.
        change: Its prescription, if it has one.
        others: The other changes that were tried.
        help: What to do, unless the change says it already.
    """

    finding: Finding
    place: str
    why: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    change: Change | None
    others: tuple[Change, ...]
    help: str


def finding_parts(finding: Finding, setting: Setting) -> FindingParts:
    """Split a finding; the lines to paste are for `setting`."""
    prescription = finding.prescription
    change = None if prescription is None else _change(prescription, setting, finding.cause)
    others = () if prescription is None else prescription.alternatives
    said = {change.text, prescription.detail} if change and prescription else set()
    return FindingParts(
        finding=finding,
        place=words.place(finding.where),
        why=words.why(finding),
        figures=tuple(figure for key, item in words.known(finding.evidence).items() for figure in _figures(key, item)),
        change=change,
        others=tuple(_change(other, setting, finding.cause) for other in others),
        help="" if finding.help in said else finding.help,
    )


def _change(prescription: Prescription, setting: Setting, cause: str | None) -> Change:
    code = code_of(prescription, setting, cause)
    unproved = prescription.kind == "code" and prescription.status in ("failed", "not_run")
    blocks = (("with ampdoctor", code.apply), ("in plain torch", code.torch))
    return Change(
        label="advice" if unproved else "change",
        text=words.change(prescription),
        status=prescription.status,
        proof=words.proof(prescription),
        blocks=tuple((title, "\n".join(lines)) for title, lines in blocks if lines),
    )


def _figures(key: str, item: Any) -> list[tuple[str, str]]:
    if isinstance(item, list | tuple) and item and all(isinstance(part, Mapping) for part in item):
        return [(f"{key}[{index}]", words.record(part)) for index, part in enumerate(item)]
    return [(key, words.record(item) if isinstance(item, Mapping) else words.value(item))]
