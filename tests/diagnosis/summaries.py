"""Summaries of healthy tensors for the tests of this folder: plain evidence, no torch."""

from __future__ import annotations

from ampdoctor.evidence.checkpoint_stats import TensorSummary


def tensor(name="fc.weight", **changes) -> TensorSummary:
    """A matrix of 32 by 32."""
    module, _, entry = name.rpartition(".")
    values = {
        "name": name,
        "role": "weight",
        "entry": entry,
        "module": module,
        "group": "",
        "file": "c.pt",
        "dtype": "float32",
        "shape": (32, 32),
        "examined": 1024,
        "counted": 1024,
        "zeros": 0,
        "nan": 0,
        "pos_infs": 0,
        "neg_infs": 0,
        "amax": 1.5,
        "amin": 0.01,
    }
    values |= changes
    values["inf"] = values.pop("pos_infs") + values["neg_infs"]
    values |= {loss.format: loss for loss in values.pop("casts", ())}
    return TensorSummary(**values)


def moment(entry="exp_avg_sq", name="fc.weight", **changes) -> TensorSummary:
    """A moment of such a matrix."""
    return tensor(name, **({"role": "moment", "entry": entry} | changes))
