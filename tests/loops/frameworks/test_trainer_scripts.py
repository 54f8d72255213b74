"""Scripts of Trainer, TRL and PEFT users, with no line added: a replay is the training, and the sick are diagnosed."""

from __future__ import annotations

import contextlib
import runpy
import sys

import pytest

for name in ("accelerate", "transformers", "datasets", "trl", "peft"):
    pytest.importorskip(name)

from ampdoctor import ReplayRequest, bisect_nan  # noqa: E402
from ampdoctor.workflows.open_replay import open_replay  # noqa: E402
from tests.loops.recorder import LOOPS, machine  # noqa: E402
from tests.replay.frameworks.trainers import recording  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS = {
    "hf_trainer.py": "--output_dir out --fp16 --max_steps 20 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 3 --label_smoothing_factor 0.1 --save_strategy no --report_to none",
    "trl_sft.py": "--output_dir out --fp16 --max_steps 20 --per_device_train_batch_size 2 --save_strategy no "
    "--gradient_accumulation_steps 3 --neftune_noise_alpha 5 --report_to none",
    "peft_lora.py": "--steps 20",
}
SICK = {
    "hf_trainer.py": "--output_dir out --fp16 --max_steps 60 --per_device_train_batch_size 2 --long_prompts 72 "
    "--report_to none",
    "trl_sft.py": "--output_dir out --fp16 --max_steps 60 --per_device_train_batch_size 4 --checkpoint outliers "
    "--report_to none",
    "peft_lora.py": "--dtype float16 --half-adapters --amp no --optim adamw_torch",
}


def trained(script, policy):
    """What `python script.py` trains on, on the machine of a replay."""
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [script, *ARGUMENTS[script].split()]
        stack.enter_context(machine(policy))
        seen = stack.enter_context(recording())
        runpy.run_path(str(LOOPS / script), run_name="__main__")
    return seen


def replayed(script, policy):
    arguments = tuple(ARGUMENTS[script].split())
    request = ReplayRequest(factory=str(LOOPS / script), script_arguments=arguments, policy=policy)
    with recording() as seen, open_replay(request) as replay:
        session = replay.session()
        step = 0
        while session.has_step(step):
            session.step(step)
            step += 1
        session.close()
    assert step == 20
    return seen


@pytest.mark.parametrize("policy", ["cuda", pytest.param("native", marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ARGUMENTS)
def test_its_replay_is_its_training(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = trained(script, policy)
    assert len(seen) >= 20
    assert replayed(script, policy) == seen


@pytest.mark.parametrize(
    ("script", "code", "step", "module"),
    [
        ("hf_trainer.py", "AMP202", 14, ""),
        ("trl_sft.py", "AMP201", 7, "model.layers.1.mlp"),
        ("peft_lora.py", "AMP501", 0, "base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default"),
    ],
)
def test_the_sick_are_diagnosed(script, code, step, module, tmp_path, monkeypatch):  # noqa: PLR0917
    monkeypatch.chdir(tmp_path)
    arguments = tuple(SICK[script].split())
    report = bisect_nan(ReplayRequest(factory=str(LOOPS / script), script_arguments=arguments, steps=max(step + 1, 8)))
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (finding.code, finding.where.step, finding.where.module) == (code, step, module)
    assert report.run["precision"] == "fp16"


@pytest.mark.slow
@pytest.mark.parametrize("script", ARGUMENTS)
def test_the_healthy_are_healthy(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = tuple(ARGUMENTS[script].split())
    report = bisect_nan(ReplayRequest(factory=str(LOOPS / script), script_arguments=arguments))
    assert (report.verdict, report.findings) == ("healthy", ())
