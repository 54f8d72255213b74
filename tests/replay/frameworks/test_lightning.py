"""A replay of Lightning's Trainer is its training: batch by batch and loss by loss, from wherever it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.adapters import Fitted
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.replay.frameworks.beside import Seen, bare, machine, replayed, same

L = pytest.importorskip("lightning", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
SCRIPT = Path(__file__).parents[3] / "fixtures" / "loops" / "lightning_module.py"
POLICIES = ("cuda", "native")


class Look(L.Callback):
    """Notes each batch and its loss, and ends a training after some steps."""

    def __init__(self, rows, steps=None, save=None):
        self.rows, self.steps, self.save = rows, steps, save

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        sums = [float(part.double().sum()) for part in batch]
        loss = float(outputs["loss"]) if "loss" in outputs else None
        self.rows.append((trainer.current_epoch, index, trainer.global_step, sums, loss, str(module.device)))
        if self.save is not None and trainer.global_step == self.save[0] and not self.save[1].exists():
            trainer.save_checkpoint(self.save[1])
            self.rows.clear()
        if self.steps is not None and trainer.global_step >= self.steps:
            trainer.should_stop = True


def train(rows, steps, save=None):
    def fit(fitted):
        trainer = fitted.trainer
        trainer.callbacks = [Look(rows, steps, save)]
        trainer.fit_loop.min_epochs = trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        rows.clear()
        trainer.fit(fitted.module, **fitted.arguments)
        weights = {name: value.clone() for name, value in fitted.module.state_dict().items()}
        return Seen(rows=list(rows), weights=weights, rate=trainer.optimizers[0].param_groups[0]["lr"])

    return fit


class Gan(L.LightningModule):
    """Two optimizers, stepped by hand, and schedules of theirs."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch, _index):
        (real, _), (of_generator, of_critic) = batch, self.optimizers()
        loss_of = functional.binary_cross_entropy_with_logits
        noise = real[:, :4].flip(0)
        ones, zeros = (torch.full((len(real), 1), value, device=self.device) for value in (1.0, 0.0))
        loss = loss_of(self.critic(real), ones) + loss_of(self.critic(self.generator(noise).detach()), zeros)
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(loss_of(self.critic(self.generator(noise)), ones))
        of_generator.step()
        for schedule in self.lr_schedulers():
            schedule.step()
        return loss.detach()

    def configure_optimizers(self):
        parts = self.generator, self.critic
        optimizers = [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in optimizers]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

    def training_step(self, batch, _index):
        return functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        if steps <= 0:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows_of_data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(96, 8, generator=generator), torch.randint(2, (96,), generator=generator)


def shuffled():
    return DataLoader(TensorDataset(*rows_of_data()), 16, shuffle=True, generator=torch.Generator().manual_seed(3))


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*rows_of_data(), strict=True)


def streamed():
    return DataLoader(Stream(), batch_size=16)


def fitted(module, loader, rows=None, **options):
    def make():
        L.seed_everything(0, verbose=False)
        made = module()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        options_now = {"max_epochs": 4, "precision": "16-mixed", "enable_checkpointing": False, **quiet, **options}
        trainer = L.Trainer(**options_now, callbacks=[] if rows is None else [Look(rows)])
        return Fitted(trainer=trainer, module=made, arguments={"train_dataloaders": loader()})

    return make


@pytest.mark.parametrize("policy", POLICIES)
def test_two_optimizers_that_the_module_steps_itself(policy):
    rows = []
    make = fitted(Gan, shuffled, rows)
    same(bare(make, train(rows, 40), policy=policy), replayed(make, rows, 20, policy=policy))


@pytest.mark.parametrize(
    ("module", "loader", "options", "at"),
    [
        (Net, shuffled, {}, 8),
        (Net, shuffled, {"accumulate_grad_batches": 4}, 3),  # the second group of an epoch has two batches
        (Net, streamed, {"accumulate_grad_batches": 2, "max_epochs": 9}, 4),
        (Gan, shuffled, {}, 16),
    ],
)
def test_it_goes_on_from_a_checkpoint_with_the_batches_that_came_next(module, loader, options, at, tmp_path):
    rows, file = [], tmp_path / "last.ckpt"
    make = fitted(module, loader, rows, **options)
    counted = 2 if module is Gan else 1
    alone = bare(make, train(rows, at + 4 * counted, save=(at, file)))
    same(alone, replayed(make, rows, 4, checkpoint=file))


@pytest.mark.parametrize(
    "at", [6, 8]
)  # the end of the first epoch; amid the second, where Lightning begins the data anew
def test_a_checkpoint_that_the_call_of_fit_names_is_resumed(at, tmp_path):
    rows, file = [], tmp_path / "last.ckpt"
    make = fitted(Net, shuffled, rows)
    bare(make, train(rows, at + 1, save=(at, file)))

    def resumed():
        made = make()
        return Fitted(trainer=made.trainer, module=made.module, arguments={**made.arguments, "ckpt_path": str(file)})

    same(bare(resumed, train(rows, at + 5)), replayed(resumed, rows, 5))


@pytest.mark.parametrize(
    ("precision", "policy", "compute", "autocast", "scaled"),
    [
        ("16-mixed", "cuda", "fp16", True, True),
        ("16-mixed", "native", "bf16", True, False),
        ("bf16-mixed", "cuda", "bf16", True, False),
        ("16-true", "cuda", "fp16", False, False),
        ("32-true", "cuda", "fp32", True, False),
    ],
)
def test_it_computes_in_what_the_trainer_says(precision, policy, compute, autocast, scaled):
    with machine(fitted(Net, shuffled, precision=precision), policy=policy) as replay:
        session = replay.session()
        assert session.has_step(0)
        session.step(0)
        gradients = [parameter.grad for parameter in session.model.parameters()]
        assert (session.precision.compute, session.precision.autocast) == (compute, autocast)
        assert (session.scaler.is_enabled(), any(gradient is None for gradient in gradients)) == (scaled, False)


class Fetching(Net):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (Net, {"devices": 4}, r"4 devices, each with its own share"),
        (Net, {"devices": "0,1"}, r"2 devices"),
        (Net, {"num_nodes": 2}, r"2 devices"),
        (Net, {"strategy": "fsdp"}, r"strategy='fsdp'\) is not replayed"),
        (Net, {"strategy": "deepspeed_stage_2"}, r"deepspeed_stage_2"),
        (Net, {"accelerator": "tpu"}, r"accelerator='tpu'\) is not replayed"),
        (Net, {"precision": "64-true"}, r"DoublePrecision"),
        (Net, {"limit_train_batches": 0}, r"ended before its first batch"),
        (Fetching, {}, r"dataloader_iter"),
    ],
)
def test_what_is_not_replayed_is_one_sentence(module, options, said):
    with machine(fitted(module, shuffled, **options)) as replay, pytest.raises(FactoryError, match=said) as raised:
        replay.session()
    assert "\n" not in str(raised.value)


def test_a_checkpoint_where_the_training_ends_is_said():
    with machine(fitted(Net, shuffled)) as replay, pytest.raises(FactoryError, match=r"step 24, where .*max_epochs=4"):
        next(replay.session().run.batches(start=24))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_device_of_ddp_is_one_device(policy):
    with machine(fitted(Net, shuffled, strategy="ddp", accelerator="gpu", devices=1), policy=policy) as replay:
        session = replay.session()
        assert session.model.trainer.world_size == 1
        assert [note for note in replay.notes if "strategy='ddp'" in note]


def parts(*kinds):
    made = fitted(Net, shuffled)()
    known = {"module": made.module, "trainer": made.trainer, "data": made.arguments["train_dataloaders"]}
    return tuple(known[kind] for kind in kinds)


@pytest.mark.parametrize("kinds", [("module", "trainer", "data"), ("data", "module", "trainer"), ("module", "data")])
def test_a_factory_returns_its_parts_in_any_order(kinds):
    with machine(lambda: parts(*kinds)) as replay:
        session = replay.session()
        assert session.has_step(2)
        assert (session.precision.compute, session.scaler.is_enabled()) == ("fp16", True)
        assert any("no Trainer was given" in note for note in replay.notes) == ("trainer" not in kinds)


def test_the_sick_script_is_diagnosed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (finding,) = bisect_nan(ReplayRequest(factory=str(SCRIPT), script_arguments=("--self-pairs",), steps=6)).findings
    assert (finding.code, finding.where.step, finding.where.op) == ("AMP202", 5, "aten.sqrt")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "lightning_logs" not in path.parts] == []
