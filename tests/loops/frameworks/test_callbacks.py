"""`AmpDoctorCallback` in real Trainers: what a user adds is one line, and what is trained is the same."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch
from torch import nn

for _name in ("transformers", "lightning", "pytorch_lightning"):
    pytest.importorskip(_name)

from transformers import Trainer, TrainingArguments  # noqa: E402

from ampdoctor.errors import SickTrainingError  # noqa: E402
from ampdoctor.workflows.watcher import standing  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Rows(torch.utils.data.Dataset):
    """Rows of which some are 0."""

    def __init__(self, *zero):
        self._x = torch.rand(32, 4, generator=torch.Generator().manual_seed(0)) + 0.1
        self._x[list(zero)] = 0

    def __len__(self):
        return len(self._x)

    def __getitem__(self, index):
        return {"x": self._x[index]}


class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.last(torch.log(x)).pow(2).mean()}


class Raising(Log):
    def forward(self, x):
        if x.sum() == 0:
            raise ZeroDivisionError("mine")
        return super().forward(x)


def hf(folder, callback=None, *, model=Log, zero=(), **settings):
    torch.manual_seed(0)
    made = model()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=8,
        per_device_train_batch_size=2,
        report_to="none",
        **{"save_strategy": "no"} | settings,
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(made, arguments, train_dataset=Rows(*zero), callbacks=[] if callback is None else [callback])
    return made, trainer


def test_a_trainer_is_watched_and_trains_the_same(tmp_path):
    from ampdoctor.integrations.hf_trainer import AmpDoctorCallback

    bare, trainer = hf(tmp_path)
    trainer.train()
    callback = AmpDoctorCallback(folder=tmp_path / "health")
    model, trainer = hf(tmp_path, callback)
    trainer.train()
    assert callback.report is None
    assert standing() is None
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), model.parameters(), strict=True))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "health" / "log.jsonl").read_text().splitlines()]
    assert kinds.count("step") == 8


def test_a_nan_that_trainers_log_hides_is_found_at_its_step(tmp_path):
    """`logging_nan_inf_filter` writes the mean of other losses into the log; the step is sick all the same."""
    from ampdoctor.integrations.hf_trainer import AmpDoctorCallback

    seen = []
    callback = AmpDoctorCallback(folder=tmp_path / "health", tell=seen.append)
    _, trainer = hf(tmp_path, callback, zero=range(0, 32, 7), logging_steps=1)
    expected = []
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        expected.append(bool((inputs["x"] == 0).any()))
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert any(expected)
    (report,) = seen
    assert report.run["step"] == expected.index(True)
    assert report.findings[0].where.op == "aten.log" or "data" in report.findings[0].message


def test_a_trainer_that_raises_or_is_stopped_is_left(tmp_path):
    from ampdoctor.integrations.hf_trainer import AmpDoctorCallback

    callback = AmpDoctorCallback(folder=tmp_path / "health")
    _, trainer = hf(tmp_path, callback, model=Raising, zero=range(32))
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.train()
    assert standing() is None
    assert '"ZeroDivisionError"' in (tmp_path / "health" / "log.jsonl").read_text()

    callback = AmpDoctorCallback(folder=tmp_path / "stopped", on_sick="stop", tell=lambda _: None)
    model, trainer = hf(tmp_path, callback, zero=range(32))
    with pytest.raises(SickTrainingError, match="step 0 is sick"):
        trainer.train()
    assert standing() is None
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_last_good_checkpoint_of_a_trainer_outlives_its_rotation(tmp_path):
    from ampdoctor.integrations.hf_trainer import AmpDoctorCallback

    callback = AmpDoctorCallback(folder=tmp_path / "health", checkpoints=True, probation=2, tell=lambda _: None)
    _, trainer = hf(tmp_path, callback, save_strategy="steps", save_steps=2, save_total_limit=1)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "health" / "log.jsonl").read_text().splitlines()]
    good = [line["step"] for line in lines if line.get("health") == "good"]
    link = tmp_path / "health" / "last_good"
    assert good
    assert good[-1] <= 6
    assert link.resolve().name == f"checkpoint-{good[-1]}"
    assert not (tmp_path / "out" / link.resolve().name).exists()
    _, again = hf(tmp_path / "again")
    again.train(resume_from_checkpoint=str(link))
    assert again.state.global_step == 8


def fit(package, folder, *callbacks, zero=(), steps=8):
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Log()

        def training_step(self, batch, _):
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    torch.manual_seed(0)
    module = Module()
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    return module, lambda: trainer.fit(module, torch.utils.data.DataLoader(Rows(*zero), batch_size=2))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_is_watched_under_both_names(package, tmp_path):
    importlib.import_module(package)
    from ampdoctor.integrations.lightning import AmpDoctorCallback

    bare, train = fit(package, tmp_path)
    train()
    callback = AmpDoctorCallback(folder=tmp_path / "health")
    module, train = fit(package, tmp_path, callback)
    train()
    assert callback.report is None
    assert standing() is None
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), module.parameters(), strict=True))

    callback = AmpDoctorCallback(folder=tmp_path / "sick", on_sick="stop", tell=lambda _: None)
    module, train = fit(package, tmp_path, callback, zero=(8,))
    with pytest.raises(SickTrainingError, match="step 4 is sick"):
        train()
    assert standing() is None
    assert callback.report.run["step"] == 4
    assert all(p.isfinite().all() for p in module.parameters())
