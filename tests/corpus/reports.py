"""What the commands say of a labelled run, asked once: a report is frozen, and tests of many files look at the same.

Tests are spread over processes; those of one case are in one group (`of_case`), so that they meet in one of them.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.profile import profile
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.requests import ReplayRequest
from fixtures.corpus import runs

FACTORY = "fixtures/corpus/runs.py:make_run"
NOT_FOUND_YET = sorted(runs.not_found_yet())
CASES = [case for case in runs.case_ids() if case not in NOT_FOUND_YET]
HEALTHY = [case for case in CASES if runs.label(case)["kind"] == "healthy"]
SICK = [case for case in CASES if case not in HEALTHY]

LARGE = ("healthy_t5_bias_log_zero",)
"""Healthy cases that take seconds: what measures them (profile, recommend) is asked with the slow tests."""


def _like_an_earlier_one():
    first = {}
    for case in CASES:
        label = runs.label(case)
        if "silent_kind" in label:
            sort = label["silent_kind"], label["kind"]
            if first.setdefault(sort, case) != case:
                yield case


MORE_OF_A_KIND = frozenset(_like_an_earlier_one())
"""Silent cases beside the first of their kind and cause: what is asked of them, is asked with the slow tests."""


def of_case(case, *values, slow=False):
    """The case, and other values with it, as a parameter of a test."""
    marks = [pytest.mark.xdist_group(case), *([pytest.mark.slow] if slow else [])]
    return pytest.param(case, *values, marks=marks, id="-".join(map(str, (case, *values))))


LONG = (
    "rmsnorm_silent_zero",
    "no_valid_scale_collapse",
    "scaler_state_lost_on_resume",
    "ppo_ratio_exp_half",
    "infonce_exp_fp32_too",
    "exp_before_clamp",
)
"""Loud cases whose diagnosis takes seconds; each has others of its kind beside it."""


def takes_seconds(case):
    """A long case, or a transformer but for one: they are diagnosed with the slow tests."""
    return case in LONG or (uses_transformers(case) and case != "gpt2_attn_scale_after_matmul")


def sort_of(case):
    """The kind of cause and the architecture; an older label has none, and its case is the only one of its model."""
    label = runs.label(case)
    return label["kind"], label.get("architecture", case)


def sort_and_policy(case, policy="cuda"):
    """For `each_value_once`: each sort of case under one policy, each kind of cause under both."""
    return {sort_of(case), (runs.label(case)["kind"], policy)}


def kind_and_phase(case, policy="cuda"):
    """For `each_value_once` where the architecture is of no matter: each kind of cause, in each phase."""
    label = runs.label(case)
    kind = label["kind"]
    return {(kind, label.get("silent_kind")), (kind, label["phase"]), policy}


def policies(case):
    """The policies under which the case is looked at: both where CUDA's casts move what its label says."""
    return ("cuda", "native") if runs.label(case)["cuda_policy"] == "moves" else ("cuda",)


def text_of(case):
    """The case's script, read and not run: to collect tests must not import what models are made of."""
    return Path(runs.CASES, f"{case}.py").read_text(encoding="utf-8")


def uses_transformers(case):
    """The case's model is one of that library: a step of it takes ten times as long as another's."""
    return "transformers" in text_of(case)


def request_of(case, policy="cuda", folder=None, **options):
    """What to replay; a checkpoint that the case begins with is written into the folder."""
    checkpoint = None
    if runs.has_checkpoint(case):
        checkpoint = str(Path(folder, "checkpoint.pt"))
        runs.write_checkpoint(case, checkpoint)
    given = {"factory": FACTORY, "arguments": {"case": case}, "device": "cpu", "policy": policy}
    return ReplayRequest(**given, checkpoint=checkpoint, **options)


@functools.cache
def _asked(workflow, case, policy):
    with tempfile.TemporaryDirectory() as folder:
        return workflow(request_of(case, policy, folder))


def diagnosed(case, policy="cuda"):
    """The report of `bisect-nan`."""
    return _asked(bisect_nan, case, policy)


def recommended(case, policy="cuda"):
    """The report of `recommend`."""
    return _asked(recommend, case, policy)


@functools.cache
def _measured(case):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "p.ampprofile")
        return profile(request_of(case, folder=folder), save=str(path)), path.read_bytes()


def profiled(case):
    """The report of `profile`."""
    return _measured(case)[0]


def saved_profile(case):
    """The content of the file that `profile` saves."""
    return _measured(case)[1]
