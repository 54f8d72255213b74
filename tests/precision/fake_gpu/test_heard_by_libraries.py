"""transformers and accelerate, who hear yes: a training in fp16, its checkpoint, and the return from there."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and nothing is emulated")
HALF = torch.float16


class Net(torch.nn.Module):
    """A model as the Trainer takes one; it keeps the format of what it computes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.seen = set()

    def forward(self, x, labels):
        logits = self.layer(x)
        self.seen.add((logits.dtype, x.is_cuda))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder, **arguments):
    rows = [{"x": torch.ones(4) * i / 24, "labels": torch.tensor(i % 2)} for i in range(24)]
    said = transformers.TrainingArguments(
        output_dir=str(folder),
        fp16=True,
        tf32=True,
        optim="adamw_torch_fused",
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    return transformers.Trainer(model=Net(), args=said, train_dataset=rows)


def test_the_trainer_trains_in_fp16_and_comes_back(tmp_path):
    asks = transformers.utils.import_utils.is_torch_cuda_available
    assert not asks()
    with emulate_cuda() as emulation, autocast_policy("cuda"):
        first = trainer(tmp_path, max_steps=3, save_steps=3)
        assert first.args.device == torch.device("cuda:0")
        first.train()
        assert first.model.seen == {(HALF, True)}
        assert first.accelerator.scaler.is_enabled()
        assert first.optimizer.param_groups[0]["fused"]
        assert (tmp_path / "checkpoint-3" / "rng_state.pth").exists()
        second = trainer(tmp_path, max_steps=5, save_strategy="no")
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert (second.state.global_step, asks()) == (5, True)
    assert len(emulation.notes) == 1
    assert not asks()


def test_accelerate_prepares_for_the_device_and_forgets_it(tmp_path):
    from accelerate import Accelerator, PartialState

    before = dict(PartialState._shared_state)
    with emulate_cuda(), autocast_policy("cuda"):
        accelerator = Accelerator(mixed_precision="fp16")
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4, pin_memory=True))
        for x in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
        assert accelerator.device.type == "cuda"
        assert accelerator.scaler.is_enabled()
        accelerator.save_state(tmp_path)
        accelerator.load_state(tmp_path)
    assert PartialState._shared_state == before
