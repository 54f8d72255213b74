"""What frameworks make of an epoch's last window, in trainings of their own; without a library its test is skipped.

The model's gradient is 1 for every sample and the learning rate is 1: the weight counts how much each step was worth.
Five micro-batches with an accumulation of 3 are a whole step and two thirds of one.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ampdoctor.batching.effects import last_window
from ampdoctor.batching.plans import BatchPlan

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
PLAN = BatchPlan(micro_batch=2, accumulation=3, data_parallel=1)
SAMPLES = 10


def library(name):
    return pytest.importorskip(name, exc_type=ImportError)


class Ones(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, _):
        return {"x": torch.ones(1)}


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.worth = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return {"loss": -(self.worth * x).mean()}


def said_of(framework):
    """What the report says the last window's gradient is worth."""
    window, gradient = last_window(None, PLAN, SAMPLES, framework)
    assert window.figure == "2 of 3 micro-batches"
    return float(gradient.figure.removeprefix("x "))


def test_accelerate():
    module = library("accelerate")
    try:
        accelerator = module.Accelerator(gradient_accumulation_steps=3, cpu=True)
        model = Count()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Ones(), batch_size=2))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        assert model.worth.item() == pytest.approx(1 + said_of("accelerate"), abs=1e-3)
    finally:
        module.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_transformers(tmp_path):
    library("accelerate")
    module = library("transformers")
    model = Count()
    arguments = module.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    try:
        module.Trainer(model, arguments, train_dataset=Ones(), optimizers=(optimizer, schedule)).train()
    finally:
        library("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    assert model.worth.item() == pytest.approx(1 + said_of("transformers"), abs=1e-3)


def test_lightning(tmp_path):
    module = library("lightning.pytorch")
    model = Count()

    class Counted(module.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=1.0)

    trainer = module.Trainer(
        accumulate_grad_batches=3,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Counted(), DataLoader(Ones(), batch_size=2))
    assert model.worth.item() == pytest.approx(1 + said_of("lightning"), abs=1e-3)
