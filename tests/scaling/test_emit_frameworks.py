"""What is printed is read by the library that it is for (`make scalers`; without a library its tests are skipped)."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ampdoctor.scaling.emit import emit
from ampdoctor.scaling.scalers import ScalerSettings
from tests.scaling.simulated import library

OURS = ScalerSettings(scale=1024.0, growth_interval=500)
SPECIAL = ScalerSettings(scale=3000.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=77)
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries


def run(emitted, **space):
    exec(compile(emitted.text, "emitted", "exec"), space)
    return space


def flags_of(emitted):
    """The words that a script gets after bash has read the array."""
    command = f"set -eu\n{emitted.text}printf '%s\\n' \"${{AMP_ARGS[@]}}\""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()


def parsed(emitted, options):
    """The flags as argparse reads them.

    Args:
        emitted: The fragment.
        options: Each flag with its type as its framework documents it; None for a switch.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in options.items():
        parser.add_argument(name, **({"action": "store_true"} if kind is None else {"type": kind}))
    return {name: value for name, value in vars(parser.parse_args(flags_of(emitted))).items() if value is not None}


def settings_of(scaler):
    return (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())


def wanted(settings):
    return tuple(settings.arguments().values())


@pytest.fixture
def scalers_without_a_gpu(monkeypatch):
    """torch switches a scaler for "cuda" off where there is none; its settings could not be read."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)


# -- accelerate --------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate():
    return library("accelerate")


def test_accelerates_handler_makes_a_scaler_with_the_settings(accelerate, scalers_without_a_gpu):
    accelerator = run(emit(SPECIAL, "accelerate"))["accelerator"]
    assert accelerator.mixed_precision == "fp16"
    # without a GPU the Accelerator makes no scaler; this is the call with which it makes one
    scaler = accelerator.scaler or accelerate.utils.modeling.get_grad_scaler(
        accelerator.distributed_type, **accelerator.scaler_handler.to_kwargs()
    )
    assert settings_of(scaler) == wanted(SPECIAL)


@pytest.mark.parametrize(("precision", "mode"), [("bf16", "bf16"), ("fp32", "no")])
def test_accelerate_takes_the_other_precisions(accelerate, precision, mode):
    accelerator = run(emit(OURS, "accelerate", precision=precision))["accelerator"]
    assert accelerator.mixed_precision == mode
    assert accelerator.scaler is None


# -- transformers ------------------------------------------------------------------------------------------------


def test_the_trainer_steps_with_the_scaler(accelerate, scalers_without_a_gpu, monkeypatch, tmp_path):
    library("transformers")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    trainer = run(emit(SPECIAL, "transformers", device="cpu"), model=model)["trainer"]
    assert trainer.args.fp16
    optimizer = trainer.accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.scaler is trainer.accelerator.scaler
    assert settings_of(optimizer.scaler) == wanted(SPECIAL)


@pytest.mark.parametrize(("precision", "mode"), [("bf16", "bf16"), ("fp32", "no")])
def test_the_trainer_takes_the_other_precisions(accelerate, monkeypatch, tmp_path, precision, mode):
    library("transformers")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    trainer = run(emit(OURS, "transformers", precision=precision), model=torch.nn.Linear(2, 2))["trainer"]
    assert trainer.accelerator.mixed_precision == mode
    assert trainer.accelerator.scaler is None


# -- lightning ---------------------------------------------------------------------------------------------------


def test_lightnings_trainer_holds_the_scaler(scalers_without_a_gpu):
    library("lightning")
    trainer = run(emit(SPECIAL, "lightning"))["trainer"]
    assert trainer.precision == "16-mixed"
    assert settings_of(trainer.precision_plugin.scaler) == wanted(SPECIAL)


@pytest.mark.parametrize(("precision", "mode"), [("bf16", "bf16-mixed"), ("fp32", "32-true")])
def test_lightning_takes_the_other_precisions(precision, mode):
    library("lightning")
    assert run(emit(OURS, "lightning", precision=precision))["trainer"].precision == mode


def test_what_is_said_of_lightnings_own_arguments_is_so():
    lightning = library("lightning")
    plugins = importlib.import_module("lightning.pytorch.plugins")
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="precision"):
        lightning.Trainer(precision="16-mixed", plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    with pytest.raises(ValueError, match="does not use a scaler"):
        plugins.FSDPPrecision("16-mixed", scaler=scaler)


# -- deepspeed ---------------------------------------------------------------------------------------------------


def deepspeed_config(emitted):
    library("deepspeed")
    config = importlib.import_module("deepspeed.runtime.config")
    return config.DeepSpeedConfig({"train_batch_size": 1, **json.loads(emitted.text)})


def deepspeed_scaler(emitted):
    """The scaler that ZeRO makes of the configuration."""
    section = deepspeed_config(emitted).float16_config
    assert section.enabled
    make = importlib.import_module("deepspeed.runtime.fp16.loss_scaler").CreateLossScaler
    return make(torch.half, section.loss_scale, section.loss_scale == 0, section.dynamic_loss_scale_args())


@pytest.fixture
def first_rank(monkeypatch):
    """DeepSpeed's scaler asks which rank it is before it logs."""
    library("deepspeed")
    module = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 0))


def test_deepspeed_reads_the_settings():
    scaler = deepspeed_scaler(emit(replace(OURS, hysteresis=3), "deepspeed"))
    assert scaler.dynamic
    assert (scaler.cur_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale) == (1024, 500, 3, 1)
    assert (scaler.scale_factor, scaler.consecutive_hysteresis) == (2.0, False)


@pytest.mark.parametrize(("wanted", "scale"), [(3000.0, 2048), (0.25, 1), (64.0, 64)])
def test_deepspeed_starts_at_the_nearest_that_it_can_say_and_the_notes_say_so(wanted, scale):
    emitted = emit(ScalerSettings(scale=wanted), "deepspeed")
    assert deepspeed_scaler(emitted).cur_scale == scale
    said = any(note.startswith(f"the scale starts at {scale} instead of {wanted:g}") for note in emitted.notes)
    assert said == (scale != wanted)


def test_deepspeed_stops_at_the_floor_when_the_notes_say(first_rank):
    emitted = emit(ScalerSettings(scale=2.0), "deepspeed")
    assert any(note.startswith("at the scale 1 the next overflow ends the run") for note in emitted.notes)
    scaler = deepspeed_scaler(emitted)
    scaler.update_scale(overflow=True)
    assert scaler.cur_scale == 1.0
    with pytest.raises(Exception, match="already at minimum"):
        scaler.update_scale(overflow=True)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_deepspeed_takes_the_other_precisions(precision):
    config = deepspeed_config(emit(OURS, "deepspeed", precision=precision))
    assert (config.float16_config.enabled, config.bfloat16_config.enabled) == (False, precision == "bf16")


# -- megatron ----------------------------------------------------------------------------------------------------

MEGATRON = {
    "--fp16": None,
    "--bf16": None,
    "--initial-loss-scale": float,
    "--min-loss-scale": float,
    "--loss-scale-window": float,
    "--hysteresis": int,
}
"""From megatron/training/arguments.py, which is not part of megatron-core."""


@pytest.fixture
def megatron(monkeypatch):
    """From flags to megatron-core's scaler, as its optimizer makes it; its tensors on the CPU."""
    library("megatron.core")
    config = importlib.import_module("megatron.core.optimizer.optimizer_config")
    module = importlib.import_module("megatron.core.optimizer.grad_scaler")
    on_cpu = SimpleNamespace(
        tensor=lambda data, dtype, device: torch.tensor(data, dtype=dtype), float=torch.float, max=torch.max
    )
    monkeypatch.setattr(module, "torch", on_cpu)

    def make(emitted):
        read = config.OptimizerConfig(**parsed(emitted, MEGATRON))
        assert read.fp16
        assert read.loss_scale is None
        return module.DynamicGradScaler(
            initial_scale=read.initial_loss_scale,
            min_scale=read.min_loss_scale,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=read.loss_scale_window,
            hysteresis=read.hysteresis,
        )

    return make


def test_megatrons_scaler_has_the_settings(megatron):
    scaler = megatron(emit(replace(OURS, hysteresis=3), "megatron"))
    assert (scaler.scale.item(), scaler.min_scale.item()) == (1024.0, 1.0)
    assert (scaler.growth_interval, scaler.hysteresis) == (500, 3)


@pytest.mark.parametrize(("precision", "read"), [("bf16", (False, True)), ("fp32", (False, False))])
def test_megatron_takes_the_other_precisions(precision, read):
    flags = parsed(emit(OURS, "megatron", precision=precision), MEGATRON)
    assert (flags["fp16"], flags["bf16"]) == read
