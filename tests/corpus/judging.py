"""Holds a report against a label of the corpus."""

from __future__ import annotations

from fixtures.corpus import runs

MOVED = ("module", "op", "nonfinite")
"""What a label does not say of CUDA's policy where its `cuda_policy` is "moves": the same step and cause, elsewhere."""


def worst_finding(report):
    """The first finding of severity error; None for a run without."""
    return next((finding for finding in report.findings if finding.severity == "error"), None)


def disagreements(case, report, policy):
    """Names of the label's fields that a report of a sick run gets wrong; ["missed"] where it finds nothing."""
    return disagreements_with(runs.label(case), report, policy)


def disagreements_with(label, report, policy):
    """The same for a label that is not in a file."""
    finding = worst_finding(report)
    return ["missed"] if finding is None else wrong_in(label, finding.cause, finding.where, policy)


def wrong_in(label, cause, where, policy):
    """The same for a cause and a place that were noted down."""
    also = label.get("also_culprits") or []
    right = {
        "cause": cause in [label["kind"], *label["kinds_ok"]],
        "step": where.step == label["step"],
        "phase": where.phase in [label["phase"], *label["phases_ok"]],
        "module": label.get("any_module", False)
        or where.module
        in [label["culprit_module"], *label.get("culprit_modules_ok", []), *(other["module"] for other in also)],
        "op": where.op in [label["culprit_op"], *label["culprit_op_aliases"], *(other["op"] for other in also)],
        "nonfinite": where.nonfinite == label["nonfinite"],
    }
    if policy == "cuda" and label["cuda_policy"] == "moves":
        right |= dict.fromkeys(MOVED, True)
    return [name for name, holds in right.items() if not holds]


SMALLER = {"skip_batch": ("fp32_modules",), "dtype": ("fp32_modules",), "fp32_modules": ("init_scale",)}
"""Kinds that change less than a labelled one: where such a change is verified, the larger one need not be tried."""


def remedied(case, report):
    """Is the labelled kind of remedy among the changes that were shown to cure, or one that changes less?

    For a change that only the user's code can make: shown by an intervention, or a verified change that needs none.
    """
    prescription = worst_finding(report).prescription
    cures = [p.kind for p in (prescription, *prescription.alternatives) if p.status in ("verified", "intervention")]
    labelled = runs.label(case)["fixed_by"]
    if "swap" in labelled:
        return bool(cures)
    return any(kind in cures or any(less in cures for less in SMALLER.get(kind, ())) for kind in labelled)
