"""What names tell of the moment at which something was saved."""

from __future__ import annotations

import pytest

from ampdoctor.checkpoints.series import moment_of


@pytest.mark.parametrize(
    ("name", "unit", "number"),
    [
        ("ckpt_1000.pt", "number", 1000),
        ("checkpoint1.pt", "number", 1),
        ("checkpoint_3_1200.pt", "number", 1200),
        ("model_step_2000.safetensors", "step", 2000),
        ("iter_0000010.pth", "step", 10),
        ("ckpt_step100_rank3.pt", "step", 100),
        ("epoch_3.pth", "epoch", 3),
        ("epoch0.pt", "epoch", 0),
        ("checkpoint-epoch12.pth.tar", "epoch", 12),
        ("epoch=02-val_loss=0.32.ckpt", "epoch", 2),
        ("epoch=3-step=1000.ckpt", "step", 1000),
        ("model_500.pt", "unsure", 500),
        ("model010000.pt", "unsure", 10000),
        ("ema_0.9999_010000.pt", "unsure", 10000),
    ],
)
def test_a_files_number_counts_what_the_word_before_it_says(name, unit, number):
    moment = moment_of(name, folder=False)
    assert (moment.unit, moment.number) == (unit, number)


NO_MOMENT = [
    "model.safetensors", "model-00001-of-00004.safetensors", "checkpoint-00002-of-00002.safetensors",
    "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "layer_00-model_00-model_states.pt",
    "random_states_0.pkl", "rng_state_1.pth", "consolidated.00.pth",
    "model_rank_7.pt", "fold_1.pt", "model_fp16.safetensors",
    "resnet18.pth", "weights_v2.pt", "llama-7b.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", NO_MOMENT)
def test_what_counts_pieces_versions_or_sizes_is_no_moment(name):
    assert moment_of(name, folder=False) is None


FOLDERS = {
    "checkpoint-500": "number",
    "step-100": "step",
    "iter_0000010": "step",
    "global_step100": "step",
    "epoch_3": "epoch",
    "1000": "unsure",
    "epoch=0-step=4-v1.ckpt": "step",
    "run_1": None,
    "version_0": None,
    "mp_rank_00": None,
    "pytorch_model_fsdp_0": None,
    "optimizer_0": None,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name):
    moment = moment_of(name, folder=True)
    assert (moment and moment.unit) == FOLDERS[name]
