"""Names of checkpoints: which are saves of one training, which are parts of one save, which are of two trainings."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.found import find
from ampdoctor.errors import CheckpointError
from ampdoctor.workflows.scan import scan

OPTIMIZER = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}}, "param_groups": [{"params": [0]}]}


def weights(size=4):
    return {"w": torch.linspace(-1, 1, size)}


def training(size=4, **counters):
    return {"model": weights(size), "optimizer": OPTIMIZER, **counters}


def steps(pattern, *of, state=training):
    """The saves of two steps under a pattern of names, for each word that a name may have."""
    return {pattern.format(word, step): state(global_step=step) for word in of or ("",) for step in (100, 200)}


def write(folder, files):
    for name, state in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, path) if name.endswith(".safetensors") else torch.save(state, path)
    return find(folder)


SERIES = {
    "words for the step": (2, steps("{}model_step{}.pt")),
    "epochs": (2, {f"model_epoch_{e}.pth": training() for e in (1, 2)}),
    "Trainer": (
        2,
        {
            f"checkpoint-{s}/{n}": o
            for s in (5, 10)
            for n, o in (("model.safetensors", weights()), ("optimizer.pt", OPTIMIZER))
        },
    ),
    "in a folder of checkpoints": (2, {f"checkpoints/checkpoint_{i}/model.safetensors": weights() for i in (0, 1)}),
    "in the folder of the only run": (2, {f"output/checkpoint-{s}/model.safetensors": weights() for s in (5, 10)}),
    "DeepSpeed": (2, {f"global_step{s}/mp_rank_00_model_states.pt": {"module": weights()} for s in (5, 10)}),
    "Lightning": (2, {f"epoch={e}-step={100 * e}.ckpt": training() for e in (3, 4)}),
    "Lightning's metrics": (2, {f"epoch={e}-val_loss=0.{e}1.ckpt": training() for e in (3, 4)}),
    "mmengine's best": (3, {n: training() for n in ("epoch_1.pth", "epoch_2.pth", "best_bbox_mAP_epoch_2.pth")}),
    "best and last": (2, {"ckpt.best.pt": training(global_step=100), "ckpt.last.pt": training(global_step=200)}),
    "Ultralytics": (2, {"weights/best.pt": training(), "weights/last.pt": training()}),
    "one seed": (2, steps("seed1{}_step{}.pt")),
    "two models of a GAN": (2, steps("{}_{}.pth", "G", "D")),
    "a teacher": (2, steps("{}_step{}.pt", "teacher", "student")),
    "two averages": (2, steps("{}_step{}.pt", "model", "ema_0.999", "ema_0.9999")),
    "ranks of each step": (2, steps("step{1}_rank{0}.pt", 0, 1)),
    "model and optimizer of each step": (
        2,
        {f"{n}_step{s}.pt": o for s in (5, 10) for n, o in (("model", weights()), ("optimizer", OPTIMIZER))},
    ),
}
ONE = {
    "ranks": {"rank0.pt": training(), "rank1.pt": training()},
    "shards": {f"model-0000{n}-of-00002.safetensors": {f"w{n}": torch.ones(2)} for n in (1, 2)},
    "Megatron": {f"mp_rank_0{n}_model_states.pt": {"module": weights()} for n in (0, 1)},
    "two models of one step": {"G_1000.pth": training(4), "D_1000.pth": training(5)},
    "model and optimizer": {"pytorch_model.bin": weights(), "optimizer.pt": OPTIMIZER},
    "model and optimizer of one step": {"model_step100.pt": weights(), "optimizer_step100.pt": OPTIMIZER},
    "model and optimizer of the best": {"model_best.pt": weights(), "optimizer_best.pt": OPTIMIZER},
    "two models of accelerate": {
        **{f"model_{i}.safetensors": weights() for i in (1, 2)},
        **{f"optimizer_{i}.bin": OPTIMIZER for i in (1, 2)},
    },
    "other architectures": {f"model_{width}.safetensors": weights(width) for width in (10, 20, 30)},
    "ranks of one step": {"step100_rank0.pt": training(), "step100_rank1.pt": training()},
}
TWO = {
    "a step of each": {"exp1_step100.pt": training(), "exp2_step100.pt": training()},
    "other steps of each": {"exp1_step100.pt": training(), "exp2_step200.pt": training()},
    "experiments": steps("exp{}_step{}.pt", 1, 2),
    "seeds": steps("seed={}-step={}.ckpt", 1, 2),
    "letters": steps("run{}-step{}.pt", "A", "B"),
    "names": steps("{}_step{}.pt", "alice", "bob"),
    "formats": steps("{}_step{}.pt", "fp16", "bf16"),
    "settings": steps("lr{}_step{}.pt", "0.1", "0.01"),
    "powers": steps("lr{}_step{}.pt", "1e-3", "1e-4"),
    "folders": {f"run{r}/step100.pt": training() for r in "AB"},
    "folders of folders": {f"run{r}/checkpoint-{s}/model.safetensors": weights() for r in "AB" for s in (5, 10)},
}


@pytest.mark.parametrize("name", SERIES)
def test_a_series(tmp_path, name):
    count, files = SERIES[name]
    found = write(tmp_path, files)
    assert (len(found.members), found.several) == (count, ())
    read = scan(tmp_path, every_member=True)
    assert (read.verdict, len(read.target["members"])) == ("healthy", count)


@pytest.mark.parametrize("name", ONE)
def test_parts_of_one_checkpoint(tmp_path, name):
    found = write(tmp_path, ONE[name])
    assert (found.members, found.several) == ((), ())
    assert {file["path"] for file in scan(tmp_path).target["files"]} == set(ONE[name])


@pytest.mark.parametrize("name", TWO)
def test_two_trainings(tmp_path, name):
    found = write(tmp_path, TWO[name])
    assert len(found.several) == 2
    with pytest.raises(CheckpointError, match=r"holds 2 runs or checkpoints.* Type: ampdoctor scan "):
        scan(tmp_path)
