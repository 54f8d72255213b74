from __future__ import annotations

import pytest

from ampdoctor.diagnosis.replay.updates import stagnation_expected
from ampdoctor.evidence.run_facts import UpdateFacts


def update(name="fc.weight", *, lost=0.95, stagnant=0.95, size=1.0, optimizer="torch.optim.adamw.AdamW", **fields):
    given = {"steps": 1, "elements": 100, "updated": 1.0, "log2_ratio": -11.0, **fields}
    return UpdateFacts(name=name, optimizer=optimizer, lost=lost, stagnant=stagnant, size=size, **given)


def test_updates_that_are_lost_are_amp501_at_the_module_that_holds_them():
    finding = stagnation_expected([update("block.fc.weight"), update("block.fc.bias"), update("block.out.weight")])
    assert (finding.code, finding.severity, finding.cause) == ("AMP501", "error", "optimizer_precision")
    assert finding.where.module == "block"
    assert finding.where.step is None
    assert "95% of the weights that move in fp32 stay" in finding.message
    assert finding.evidence["moved"] == 300
    assert finding.prescription.status == "not_run"


@pytest.mark.parametrize(
    "sound",
    [
        [update(lost=0.7)],
        [update(stagnant=0.7)],
        [update(), update("out.weight", lost=0.1, stagnant=0.1, size=10.0)],
        [update(optimizer="torchao.optim.adam._AdamW")],
        [update(updated=0.0, lost=0.0, stagnant=0.0, size=0.0)],
        [],
    ],
)
def test_nothing_is_said_of_updates_that_mostly_arrive_or_of_optimizers_that_may_keep_what_is_lost(sound):
    assert stagnation_expected(sound) is None
