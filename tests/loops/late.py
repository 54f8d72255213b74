"""Faults of the training scripts of `fixtures/loops` that show after 200 or more optimizer steps, and healthy twins.

Each truth was found in the bare script; `fixtures/loops/README.md` has them as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOOPS = Path(__file__).parents[2] / "fixtures" / "loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTruth:
    """Where a late fault is; `step` is the first harmed optimizer step, from 0, as attempted: skipped ones count."""

    code: str
    step: int
    phase: str  # "data", "forward", "loss" or "backward"
    module: str  # the innermost; "" outside all, or in the outermost one's own code
    op: str  # at whose output the first harmful non-finite number is
    line: str  # a library's where the op is a library's


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A script with a late fault."""

    name: str  # of its file, without `.py`
    sick: tuple[str, ...]  # the command line with the fault
    healthy: tuple[str, ...]  # one of the same length without
    frameworks: bool = False  # whether it needs the libraries of `make scalers`
    truth: LateTruth

    @property
    def path(self) -> Path:
        """The file."""
        return LOOPS / f"{self.name}.py"


_GAN = "--ds 0.1 --batchSize 16 --ngf 8 --ndf 8 --niter 2 --lr 5e-5 --init-scale 512"
_PPO = "--num-envs 2 --update-epochs 1"
_TRL = (
    "--output_dir out --fp16 --per_device_train_batch_size 1 --dataset_size 300 --max_steps 290 "
    "--save_strategy no --report_to none --seed 6"
)
_PEFT = "--steps 300 --bs 1"
_LIGHTNING = "--batch-size 4 --num-classes 2 --per-class 520 --max-epochs 1 --seed 5"

LATE = (
    Late(
        name="gan",
        sick=(*_GAN.split(), "--dataSize", "3217"),
        healthy=(*_GAN.split(), "--dataSize", "3232"),
        truth=LateTruth(code="AMP202", step=201, phase="loss", module="", op="aten.std", line="gan.py:204"),
    ),
    Late(
        name="ppo",
        sick=(*_PPO.split(), *"--num-steps 513 --num-minibatches 205 --total-timesteps 2052".split()),
        healthy=(*_PPO.split(), *"--num-steps 515 --num-minibatches 206 --total-timesteps 2060".split()),
        truth=LateTruth(code="AMP202", step=205, phase="loss", module="", op="aten.std", line="ppo.py:233"),
    ),
    Late(
        name="trl_sft",
        sick=(*_TRL.split(), "--checkpoint", "outliers", "--tool_every", "200"),
        healthy=(*_TRL.split(), "--checkpoint", "base", "--tool_every", "200"),
        frameworks=True,
        truth=LateTruth(
            code="AMP201",
            step=281,
            phase="forward",
            module="model.layers.1.mlp",
            op="aten.mul",
            line="modeling_llama.py:164",
        ),
    ),
    Late(
        name="peft_lora",
        sick=(*_PEFT.split(), "--unlabelled", "1"),
        healthy=(*_PEFT.split(),),
        frameworks=True,
        truth=LateTruth(
            code="AMP202",
            step=277,
            phase="forward",
            module="base_model.model",
            op="aten.nll_loss_forward",
            line="modeling_bert.py:1126",
        ),
    ),
    Late(
        name="lightning_module",
        sick=(*_LIGHTNING.split(), "--self-pairs"),
        healthy=(*_LIGHTNING.split(),),
        frameworks=True,
        truth=LateTruth(
            code="AMP202", step=226, phase="backward", module="", op="aten.div", line="lightning_module.py:61"
        ),
    ),
)
