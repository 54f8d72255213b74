"""Numbers outside of tensors that are not finite: which of them are losses of the training, by their names."""

from __future__ import annotations

import math
import re

from ampdoctor.evidence.checkpoint_stats import LostNumbers

_WORD = re.compile(r"[a-z]+")
_OF_TRAINING = frozenset(
    {
        "loss", "losses", "train", "training", "total", "avg", "average", "mean", "epoch", "running", "cur", "current",
        "last", "prev", "step", "batch", "iter", "history", "log", "logs", "sum", "smoothed", "ema", "value",
    }
)  # fmt: skip
"""Words of a training loss's name: `train_loss`, `running_loss`; `loss_scale` and `val_loss` are something else."""
_HELD_OUT = frozenset({"val", "valid", "validation", "dev", "eval", "evaluation", "test", "best", "min", "lowest"})


def is_training_loss(lost: LostNumbers) -> bool:
    """Whether the numbers are losses of the training, by their name, and the last of them is lost.

    An infinite one counts by its plainest names alone: a best or an earlier loss starts at infinity.
    """
    *above, name = re.split(r"[./]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", lost.name)) or [""]
    if name.isdigit() and above:
        name = above.pop()
    words = set(_WORD.findall(name.lower()))
    around = {word for part in above for word in _WORD.findall(part.lower())}
    if not words & {"loss", "losses"} or not words <= _OF_TRAINING or around & _HELD_OUT:
        return False
    return math.isnan(lost.last) or (math.isinf(lost.last) and not words & {"last", "prev"})
