"""The labels of the silent kinds: complete, listed in the corpus's README, and true by a runner of plain torch.

Run as a script, it writes the README's table of them anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.corpus import runs, verify

README = runs.CASES.parent / "README.md"
BEGIN, END = "<!-- silent:begin -->\n", "<!-- silent:end -->"
SILENT = [case for case in runs.case_ids() if "silent_kind" in runs.label(case)]
QUICK = ("clip_logit_scale_bf16_frozen", "healthy_dead_relu_critic")
"""Held against plain torch with every `make test`, in one process; the others with the slow tests."""


def table():
    """The README's table, a row a case."""
    yield "| id | silent kind | architecture | step | module | op | harmed | precision | found |"
    yield "|---|---|---|---|---|---|---|---|---|"
    not_yet = runs.not_found_yet()
    for case in sorted(SILENT, key=lambda case: (place(case), case)):
        label = runs.label(case)
        healthy = label["kind"] == "healthy"
        tensors = [f"`{name}`" for name in label["tensors"]]
        harmed = ", ".join(tensors[:2]) + (f" and {len(tensors) - 2} more" if len(tensors) > 2 else "")
        cells = [
            f"`{case}`",
            label["silent_kind"],
            label["architecture"],
            "" if healthy else label["step"],
            "" if healthy else f"`{label['culprit_module'] or '(root)'}`",
            "" if healthy else f"`{label['culprit_op']}`",
            harmed,
            f"{'fp16' if label['precision'] == 'float16' else 'bf16'} {label['mode']}",
            "not yet" if case in not_yet else "yes",
        ]
        yield "| " + " | ".join(map(str, cells)) + " |"


def place(case):
    """Kinds in the order of the runner's list, healthy ones last."""
    kind = runs.label(case)["silent_kind"]
    return verify.KINDS.index(kind) if kind in verify.KINDS else len(verify.KINDS)


def with_table(text):
    """The README's text, its table of silent kinds made from the labels."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "".join(f"{line}\n" for line in table()) + END + after


def test_the_readme_lists_what_the_labels_say():
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text)


def silent_kinds(cases):
    return {(runs.label(case)["silent_kind"], runs.label(case)["kind"]) for case in cases}


@pytest.mark.each_value_once(of=silent_kinds)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="quick"),
        *(pytest.param((case,), marks=pytest.mark.slow, id=case) for case in SILENT if case not in QUICK),
    ],
)
def test_plain_torch_measures_what_the_labels_say(cases):
    command = [sys.executable, Path(verify.__file__), "--mutate", *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"PASS  {case}\n" in done.stdout for case in cases)
    assert f"{len(cases)} of {len(cases)} labels hold; " in done.stdout


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
