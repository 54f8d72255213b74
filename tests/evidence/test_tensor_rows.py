from __future__ import annotations

from dataclasses import asdict

import pytest

from ampdoctor.evidence.checkpoint_stats import CastLoss, TensorSummary
from ampdoctor.evidence.report_scan import TensorRows

LOST = CastLoss(format="fp16", flushed=0.25, subnormal=0.5, overflowed=0.125, relative_error=0.1, headroom=-1.0)


def tensor(name, **known):
    numbers = {
        "name": name,
        "role": "weight",
        "entry": "weight",
        "module": "fc",
        "group": "",
        "file": "model.pt",
        "dtype": "float32",
        "shape": (2, 3),
        "examined": 6,
        "counted": 6,
        "zeros": 1,
        "nans": 0,
        "pos_infs": 0,
        "neg_infs": 0,
        "amax": 2.0,
        "amin": 0.5,
    }
    return TensorSummary(**{**numbers, **known})


def test_a_row_has_the_numbers_of_its_tensor():
    (row,) = TensorRows((tensor("fc.weight", nans=2, pos_infs=3, neg_infs=4, at_max=5, casts=(LOST,)),))
    assert asdict(row) == {
        "name": "fc.weight",
        "role": "weight",
        "entry": "weight",
        "module": "fc",
        "group": "",
        "file": "model.pt",
        "dtype": "float32",
        "shape": (2, 3),
        "examined": 6,
        "counted": 6,
        "zeros": 1,
        "nan": 2,
        "inf": 7,
        "at_max": 5,
        "amax": 2.0,
        "amin": 0.5,
        "fp16": {"flushed": 0.25, "subnormal": 0.5, "overflowed": 0.125},
        "bf16": None,
    }


def test_rows_are_in_the_order_of_the_tensors_and_can_be_sliced():
    rows = TensorRows((tensor("b"), tensor("a"), tensor("c")))
    assert [row.name for row in rows] == ["b", "a", "c"]
    assert [row.name for row in rows[1:]] == ["a", "c"]
    assert rows[-1].name == "c"


def test_inside_a_folder_the_files_are_named_from_above_it():
    rows = TensorRows((tensor("a"), tensor("b", file="")))
    assert [row.file for row in rows.inside("step-5")] == ["step-5/model.pt", ""]
    assert [row.file for row in rows.inside("step-5")[:1]] == ["step-5/model.pt"]
    assert [row.file for row in rows.inside("")] == ["model.pt", ""]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ((tensor("a"), tensor("b")), True),
        ((tensor("b"), tensor("a")), False),
        ((tensor("a"),), False),
        ((tensor("a"), tensor("b", zeros=2)), False),
    ],
)
def test_rows_are_equal_to_equal_rows_however_they_are_kept(other, same):
    rows = TensorRows((tensor("a"), tensor("b")))
    assert (rows == TensorRows(other)) is same
    assert (rows == list(TensorRows(other))) is same
    assert rows != "ab"
