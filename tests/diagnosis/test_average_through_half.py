"""AMP114: what an averaged copy's Inf and the model's own tensor say together."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.workflows.scan import scan
from tests.diagnosis.summaries import tensor


def ema(name="fc.weight", **changes):
    return tensor(name, **{"role": "ema", "group": "ema", "pos_infs": 1, "amax": 60000.0} | changes)


MODEL = tensor(amax=70000.0)


@pytest.mark.parametrize(
    ("tensors", "codes"),
    [
        ([MODEL, ema()], ["AMP114"]),
        ([MODEL, ema("model_ema.fc.weight", group="")], ["AMP114"]),
        ([MODEL, ema("model_ema.fcweight", group="")], ["AMP114"]),
        ([tensor("module.fc.weight", amax=70000.0), ema()], ["AMP114"]),
        ([tensor("bn.running_var", role="buffer", amax=1e6), ema("bn.running_var")], ["AMP114"]),
        ([MODEL, ema(nan=1)], ["AMP101"]),
        ([tensor(amax=65504.0), ema()], ["AMP101"]),
        ([tensor(amax=70000.0, nan=1), ema()], ["AMP101", "AMP101"]),
        ([tensor("other.weight", amax=70000.0), ema()], ["AMP101"]),
        ([tensor(amax=70000.0, shape=(4, 4)), ema()], ["AMP101"]),
        ([MODEL, ema(pos_infs=0, amax=69000.0)], []),
    ],
)
def test_an_average_that_is_infinite_where_the_model_is_beyond_fp16(tensors, codes):
    findings = judge(CheckpointSummary(format="torch-zip", tensors=tuple(tensors)))
    assert sorted(f.code for f in findings if f.code in ("AMP101", "AMP102", "AMP114")) == codes


@pytest.mark.parametrize("prefix", [{"ema": ""}, {"": "model_ema."}])
@pytest.mark.parametrize("through_half", [True, False])
def test_scan_says_what_to_copy_and_what_to_validate(tmp_path, prefix, through_half):
    model = {"fc.weight": torch.randn(64, 64), "bn.running_var": torch.ones(8)}
    model["fc.weight"][3, 3] = 70000.0
    average = {name: value.half().float() if through_half else value.clone() for name, value in model.items()}
    ((key, start),) = prefix.items()
    named = {start + name: value for name, value in average.items()}
    saved = {"model": model, key: named} if key else {"model": {**model, **named}}
    torch.save(saved, tmp_path / "c.pt")
    report = scan(tmp_path / "c.pt")
    assert report.verdict == ("sick" if through_half else "healthy")
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [finding.code for finding in errors] == (["AMP114"] if through_half else [])
    checks = {check.name: check.result for check in report.checks}
    assert checks["finite averaged weights"] == ("found" if through_half else "ok")
    if through_half:
        assert "70,000, above fp16's largest value, 65,504: the copy was cast to fp16" in errors[0].message
        assert "Copy the average from the model" in errors[0].help
        assert errors[0].evidence["model_amax"] == 70000.0
