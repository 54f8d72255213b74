from __future__ import annotations

import torch

from ampdoctor.hooks.program import called_as_recorded, recorded_at
from ampdoctor.probes.op_overrides import Intervention, UserLine
from ampdoctor.probes.user_code import as_source


def test_an_op_of_a_recorded_step_is_met_at_its_recorded_line():
    half = torch.tensor([60000.0], dtype=torch.float16)
    address = UserLine(as_source(("train.py", 61)), "mul")
    mode = Intervention([address], "fp32")
    with mode.watching(), recorded_at(("train.py", 61)):
        result = called_as_recorded(torch.Tensor.mul, (half, 2), {})
    assert result.item() == 120000.0
    assert mode.met == {address}
