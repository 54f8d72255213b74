from __future__ import annotations

import pytest
import torch

from ampdoctor.errors import UsageError
from ampdoctor.precision.spec import Precision

HALF = torch.float16


@pytest.mark.parametrize(
    ("precision", "product"),
    [
        (Precision("fp16"), HALF),
        (Precision("bf16"), torch.bfloat16),
        (Precision("fp32"), torch.float32),
        (Precision("tf32"), torch.float32),
        (Precision("fp16", autocast=False), torch.float32),
        (Precision("bf16", autocast=False, master_weights=True), torch.float32),
    ],
)
def test_what_a_step_sees(precision, product):
    autocast = precision.context("cpu")
    for _ in range(2):
        with autocast():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is product


def test_the_switches_for_cuda():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    with Precision("tf32").environment("cuda"):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        with Precision("fp32").environment("cuda"):
            assert not torch.backends.cudnn.allow_tf32
    with Precision("fp16").environment("cuda"):
        pass
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"compute": "fp8"}, "not built yet"),
        ({"compute": "int4"}, "'int4'"),
        ({"compute": "fp16", "master_weights": True}, "autocast to False"),
        ({"compute": "fp32", "autocast": False, "master_weights": True}, "not to fp32"),
    ],
)
def test_what_is_refused(arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        Precision(**arguments)
