"""Faults of the training scripts of `fixtures/loops` that show after 200 or more optimizer steps, and healthy twins.

Each truth was found in the bare script, by `tests/loops/origins.py`; `fixtures/loops/README.md` has them as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOOPS = Path(__file__).parents[2] / "fixtures" / "loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTruth:
    """Where a late fault is.

    `step` is the first harmed optimizer step, from 0, as attempted: skipped ones count. It is None where it is another
    on each processor, as of a training that grows sick by itself: `origins.py` finds it there.
    """

    code: str
    step: int | None
    turn: int | None  # of the training loop, from 0; None likewise
    optimizer: int = 0  # which of the loop's optimizers was to take that step, in order of their first steps
    phase: str  # "data", "forward", "loss" or "backward"
    module: str  # the innermost; "" outside all, or in the outermost one's own code
    op: str  # at whose output the first harmful non-finite number is
    line: str  # a library's where the op is a library's
    settles: tuple[int, ...] = ()  # attempts of that optimizer that a scaler skipped before, as healthy runs do


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


_NANOGPT = (
    "--n_layer=1 --n_embd=64 --n_head=1 --batch_size=4 --block_size=16 --gradient_accumulation_steps=1 "
    "--eval_interval=1000 --max_iters=300 --lr_decay_iters=20000 --warmup_iters=2400"
)
_VISION = "--num-samples 2560 -b 8 --img-size 8 --epochs 1 --seed 8"
_GAN = "--ds 0.1 --batchSize 16 --ngf 8 --ndf 8 --niter 2 --lr 5e-5 --init-scale 512"
_PPO = "--num-envs 2 --update-epochs 1"
_DIFFUSION = (
    "--image_size 8 --dim 4 --train_batch_size 4 --save_and_sample_every 1000 --train_num_steps 240 "
    "--timesteps 1500 --seed 7"
)
_HF = (
    "--output_dir out --fp16 --per_device_train_batch_size 1 --num_examples 300 --max_steps 300 "
    "--save_strategy no --report_to none --seed 1"
)
_TRL = (
    "--output_dir out --fp16 --per_device_train_batch_size 1 --dataset_size 300 --max_steps 290 "
    "--save_strategy no --report_to none --seed 6"
)
_PEFT = "--steps 300 --bs 1"
_LIGHTNING = "--batch-size 4 --num-classes 2 --per-class 520 --max-epochs 1 --seed 5"
_ACCELERATE = "--num_examples 7900 --empty_every 7000 --num_epochs 1 --seed 5"

LATE = (
    Late(
        name="nanogpt",
        sick=(*_NANOGPT.split(), "--learning_rate=3.0"),
        healthy=(*_NANOGPT.split(), "--learning_rate=3e-3"),
        truth=LateTruth(
            code="AMP201",
            step=None,
            turn=None,
            phase="forward",
            module="transformer.h.0.attn",
            op="aten.bmm",
            line="nanogpt.py:94",
        ),
    ),
    Late(
        name="vision_ema",
        sick=(*_VISION.split(), "--norm-per-image"),
        healthy=(*_VISION.split(),),
        truth=LateTruth(
            code="AMP204", step=254, turn=254, phase="data", module="", op="aten.div", line="vision_ema.py:227"
        ),
    ),
    Late(
        name="gan",
        sick=(*_GAN.split(), "--dataSize", "3217"),
        healthy=(*_GAN.split(), "--dataSize", "3232"),
        truth=LateTruth(
            code="AMP202",
            step=201,
            turn=201,
            optimizer=1,
            phase="loss",
            module="",
            op="aten.std",
            line="gan.py:204",
        ),
    ),
    Late(
        name="ppo",
        sick=(*_PPO.split(), *"--num-steps 513 --num-minibatches 205 --total-timesteps 2052".split()),
        healthy=(*_PPO.split(), *"--num-steps 515 --num-minibatches 206 --total-timesteps 2060".split()),
        truth=LateTruth(
            code="AMP202",
            step=205,
            turn=0,
            phase="loss",
            module="",
            op="aten.std",
            line="ppo.py:233",
            settles=(0, 1, 2),
        ),
    ),
    Late(
        name="diffusion",
        sick=(*_DIFFUSION.split(), "--zero_snr"),
        healthy=(*_DIFFUSION.split(),),
        truth=LateTruth(
            code="AMP202", step=218, turn=218, phase="forward", module="", op="aten.div", line="diffusion.py:242"
        ),
    ),
    Late(
        name="hf_trainer",
        sick=(*_HF.split(), "--long_prompts", "1"),
        healthy=(*_HF.split(), "--long_prompts", "0"),
        frameworks=True,
        truth=LateTruth(
            code="AMP202",
            step=208,
            turn=208,
            phase="forward",
            module="",
            op="aten.div",
            line="loss_utils.py:47",
            settles=(0,),
        ),
    ),
    Late(
        name="trl_sft",
        sick=(*_TRL.split(), "--checkpoint", "outliers", "--tool_every", "200"),
        healthy=(*_TRL.split(), "--checkpoint", "base", "--tool_every", "200"),
        frameworks=True,
        truth=LateTruth(
            code="AMP201",
            step=281,
            turn=281,
            phase="forward",
            module="model.layers.1.mlp",
            op="aten.mul",
            line="modeling_llama.py:164",
            settles=(0, 1, 2, 3, 5, 29, 79, 225),
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
            turn=277,
            phase="forward",
            module="base_model.model",
            op="aten.nll_loss_forward",
            line="modeling_bert.py:1126",
            settles=(0,),
        ),
    ),
    Late(
        name="lightning_module",
        sick=(*_LIGHTNING.split(), "--self-pairs"),
        healthy=(*_LIGHTNING.split(),),
        frameworks=True,
        truth=LateTruth(
            code="AMP202",
            step=226,
            turn=226,
            phase="backward",
            module="",
            op="aten.div",
            line="lightning_module.py:61",
        ),
    ),
    Late(
        name="accelerate_loop",
        sick=(*_ACCELERATE.split(), "--keep_empty"),
        healthy=(*_ACCELERATE.split(),),
        frameworks=True,
        truth=LateTruth(
            code="AMP202",
            step=207,
            turn=207,
            phase="forward",
            module="attention.0",
            op="aten._softmax",
            line="accelerate_loop.py:56",
        ),
    ),
)
