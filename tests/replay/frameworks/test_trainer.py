"""A replay of a Hugging Face Trainer is its training: batch by batch and loss by loss, from wherever it begins."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from ampdoctor import ReplayRequest, TrainingRun
from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.adapters import TRAINER, adapter_of
from ampdoctor.workflows.open_replay import open_replay
from tests.replay.frameworks.trainers import make_trainer, recording

pytestmark = pytest.mark.filterwarnings("ignore")


def replayed(factory, **request):
    """What a replay sees to its last step, and the session's weights."""
    with recording() as seen, open_replay(ReplayRequest(factory=factory, policy="native", **request)) as replay:
        session = replay.session()
        step = 0
        while session.has_step(step):
            session.step(step)
            step += 1
        weights = {name: value.clone() for name, value in session.model.state_dict().items()}
        session.close()
    return seen, weights


def trained(trainer):
    with recording() as seen:
        trainer.train()
    return seen, trainer.model.state_dict()


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 3},  # 14 batches in an epoch: its last update takes two
        {"bf16": True},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    ],
)
def test_it_is_the_training(tmp_path, arguments):
    torch.manual_seed(0)
    seen, weights = trained(make_trainer(tmp_path, **arguments))
    again, replayed_weights = replayed(lambda: make_trainer(tmp_path, **arguments))
    assert len(again) == len(seen) >= 12
    assert again == seen
    assert same(weights, replayed_weights)


@pytest.mark.parametrize("how", ["--checkpoint", "its own"])
@pytest.mark.parametrize("saved", [3, 7])
def test_it_goes_on_where_its_checkpoint_stands(tmp_path, how, saved):
    def make():
        trainer = make_trainer(tmp_path, gradient_accumulation_steps=3)
        if how == "--checkpoint":
            return trainer
        return TrainingRun.from_trainer(trainer, resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))

    torch.manual_seed(0)
    saving = {"save_strategy": "steps", "save_steps": saved}
    seen, weights = trained(make_trainer(tmp_path, gradient_accumulation_steps=3, **saving))
    given = str(tmp_path / f"checkpoint-{saved}") if how == "--checkpoint" else None
    again, replayed_weights = replayed(make, checkpoint=given)
    assert again == seen[-len(again) :]
    assert len(again) == {3: 25, 7: 14}[saved]
    assert same(weights, replayed_weights)


@pytest.mark.parametrize(
    ("arguments", "precision", "computes"),
    [
        ({"bf16": True}, None, torch.bfloat16),
        ({"bf16": True}, "fp16", torch.float16),
        ({"bf16": True}, "fp32", torch.float32),
        ({}, "fp16", torch.float16),
    ],
)
def test_another_precision_and_the_reference_reach_its_model(tmp_path, arguments, precision, computes):
    computed = []

    def make():
        trainer = make_trainer(tmp_path, **arguments)
        trainer.model.out.register_forward_hook(lambda _module, _inputs, output: computed.append(output.dtype))
        return trainer

    with open_replay(ReplayRequest(factory=make, precision=precision)) as replay:
        session = replay.session()
        assert session.has_step(0)
        session.step(0)
        with session.reference():
            session.step(0)
        session.close()
    assert computed == [computes, torch.float32]


def test_fp16_has_the_scaler_and_comes_from_the_arguments(tmp_path):
    with open_replay(ReplayRequest(factory=lambda: make_trainer(tmp_path, fp16=True, use_cpu=False))) as replay:
        session = replay.session()
        assert session.has_step(0)
        outcome = session.step(0)
        accelerator = session.run.step.args[0].accelerator
        assert (session.run.precision, outcome.scale_before, outcome.optimizer_steps) == ("fp16", 65536.0, 1)
        assert accelerator.scaler is session.scaler
        session.close()


class Tracker(TensorBoardCallback):
    def __init__(self):
        """Without TensorBoard."""

    def on_train_begin(self, *_args, **_kwargs):
        pytest.fail("a replay is no training to be tracked")


def test_what_reports_is_left_out_and_said(tmp_path):
    run = TrainingRun.from_trainer(make_trainer(tmp_path, callbacks=[Tracker()]))
    assert run.notes == ("nothing is reported to a tracker: Tracker left out of the Trainer's callbacks",)


def test_callbacks_hear_of_the_steps_and_are_put_back(tmp_path):
    class Counting(TrainerCallback):
        heard = ()

        def on_train_begin(self, args, state, control, **kwargs):
            self.heard += ("train",)

        def on_step_end(self, args, state, control, **kwargs):
            self.heard += (state.global_step,)

    counting = Counting()
    with open_replay(ReplayRequest(factory=lambda: make_trainer(tmp_path, callbacks=[counting]))) as replay:
        session = replay.session()
        assert session.has_step(1)
        session.step(0)
        before = session.snapshot()
        session.step(1)
        assert counting.heard == ("train", 1, 2)
        before.restore()
        assert counting.heard == ("train", 1)
        session.close()


@pytest.mark.parametrize(
    ("attribute", "what"), [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed's engine")]
)
def test_what_is_not_replayed_is_one_sentence(tmp_path, attribute, what):
    trainer = make_trainer(tmp_path)
    setattr(trainer, attribute, True)
    with pytest.raises(FactoryError, match=f"the Trainer trains with {what}, which is not replayed"):
        TrainingRun.from_trainer(trainer)


def test_a_scripts_call_of_train_hands_over_the_trainer(tmp_path):
    class Ended(BaseException):
        pass

    reached = []

    def end(made):
        reached.append(made)
        raise Ended

    trainer = make_trainer(tmp_path)
    with TRAINER.at_entry(end), pytest.raises(Ended):
        trainer.train("here", trial=None)
    assert (reached[0].trainer, reached[0].arguments) == (trainer, {"resume_from_checkpoint": "here", "trial": None})
    assert adapter_of(reached[0]) is adapter_of(trainer) is TRAINER
    assert trainer.state.global_step == 0
