"""Whatever ends a replay, at whatever stage, the user's objects and the process are as they were."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ampdoctor.errors import AmpdoctorError, FactoryError, ReplayError, UserCodeError
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows import interruptible

FACTORY = "tests.workflows.interruptible:make_run"
SICK, WELL = 3e5, 1.0
ROOT = Path(__file__).parents[2]
CALLBACKS = ("forward", "loss", "optimizer", "after_step", "move", "batches", "next batch")
BUILDERS = ("factory", "make_optimizer", "scheduler", "scaler")
ERRORS = {
    "ctrl_c": KeyboardInterrupt,
    "mistake": lambda: ValueError("a mistake"),
    "exit": lambda: SystemExit(3),
    "memory": MemoryError,
    "accelerator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "allocator": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
}


def replay(factor, function=FACTORY, **options):
    arguments = {"factor": factor} if function == FACTORY else {}
    return bisect_nan(ReplayRequest(factory=function, arguments=arguments, steps=3, **options))


def process():
    """What of the process a replay could leave changed."""
    return (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        list(sys.argv),
        list(sys.path),
        Path.cwd(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.set_anomaly_enabled,
        torch.amp.GradScaler.scale,
        torch.autograd.Variable._execution_engine,
        torch.cuda.is_available,
        torch.Tensor.cuda,
        torch.get_default_dtype(),
    )


def assert_untouched(*, function="make_run", factor=WELL):
    """The run that the factory made last is as a fresh one is."""
    made = [run for run, _ in interruptible.LAST]
    for run in made:
        for module in run.model.modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            assert not any(hooks)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in run.model.parameters())
    run, optimizer = interruptible.LAST[0]
    interruptible.reset()
    with torch.random.fork_rng():
        fresh = getattr(interruptible, function)(**({"factor": factor} if function == "make_run" else {}))
    other = interruptible.LAST[0][1]
    assert run.model.training == fresh.model.training
    expected = fresh.model.state_dict()
    for key, value in run.model.state_dict().items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert optimizer.state_dict()["state"] == {}
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(p) for p in run.model.parameters()
    ]


def refusal(factor):
    """The error that a replay ends with; None where it gives a report all the same."""
    try:
        replay(factor)
    except AmpdoctorError as error:
        return error
    return None


def calls_of(callback, factor):
    interruptible.reset()
    replay(factor)
    return interruptible.CALLS[callback].qsize()


def everywhere():
    """(callback, error, every how many calls, factor): each callback in turn in a sick run and in a well one."""
    yield from (("loss", "ctrl_c", 3, factor) for factor in (SICK, WELL))
    for turn, callback in enumerate(callback for callback in CALLBACKS if callback != "loss"):
        yield callback, "ctrl_c", 5, (SICK, WELL)[turn % 2]
    yield from [("optimizer", "mistake", 5, SICK), ("move", "mistake", 5, WELL), ("loss", "memory", 5, SICK)]


@pytest.mark.parametrize(("callback", "error", "every", "factor"), [*everywhere()])
def test_at_every_call_of_every_callback(callback, error, every, factor):
    """The calls of a sick run lie in pass 1, the trace, the reference and the trials; of a well one, beside fp32.

    A step calls each of them once: the calls are spread over the steps.
    """
    before = process()
    total = calls_of(callback, factor)
    first = (CALLBACKS.index(callback) + len(error)) % every
    for call in {*range(first, total, every), total - 1}:
        interruptible.reset(callback, call, ERRORS[error]())
        if error == "ctrl_c":
            with pytest.raises(KeyboardInterrupt):
                replay(factor)
        else:
            said = refusal(factor)
            assert said is None or isinstance(said, ReplayError if error == "memory" else UserCodeError)
            assert said is None or "\n" not in str(said)
        assert_untouched(factor=factor)
    assert process()[1:] == before[1:]
    assert process()[0] == before[0]


@pytest.mark.parametrize(
    ("callback", "error"), [*zip([*BUILDERS, "loss", "after_step"], ERRORS, strict=True), ("loss", "mistake")]
)
def test_in_the_first_pass_it_is_a_sentence(callback, error):
    before = process()
    interruptible.reset(callback, 0 if callback in BUILDERS else 1, ERRORS[error]())
    expected = (
        KeyboardInterrupt if error == "ctrl_c" else UserCodeError if error in ("mistake", "exit") else ReplayError
    )
    with pytest.raises(expected) as caught:
        replay(WELL)
    if expected is ReplayError:
        assert "ran out of memory" in str(caught.value)
    if interruptible.LAST:
        assert_untouched()
    assert process() == before


def test_memory_that_runs_out_in_our_own_code(monkeypatch):
    from ampdoctor.workflows import step_beside_fp32

    def greedy(*_):
        torch.empty(1 << 50)

    monkeypatch.setattr(step_beside_fp32.Fp32Step, "compared", greedy)
    interruptible.reset()
    with pytest.raises(ReplayError, match="the replay ran out of memory"):
        replay(WELL)
    assert_untouched()


def test_a_run_in_which_nothing_can_train_is_not_called_healthy():
    interruptible.reset()
    report = replay(WELL, "tests.workflows.interruptible:without_trainable_parameters")
    assert (report.verdict, report.findings) == ("inconclusive", ())
    (error,) = report.errors
    assert error.message.startswith("no parameter of the model or of an optimizer requires a gradient: nothing trains")


def test_a_model_without_trainable_parameters_whose_forward_fails_is_sick_all_the_same():
    interruptible.reset()
    report = replay(WELL, "tests.workflows.interruptible:frozen_and_overflowing")
    assert (report.verdict, report.errors) == ("sick", ())


def test_a_loss_without_a_gradient():
    interruptible.reset()
    with pytest.raises(FactoryError, match="the loss does not depend on any parameter"):
        replay(WELL, "tests.workflows.interruptible:detached_loss")
    assert_untouched()


@pytest.mark.parametrize("callback", [None, "make_optimizer", "loss"])
def test_a_model_that_was_cast_is_given_back_in_its_own_dtype(callback):
    interruptible.reset(callback, 0, ValueError("no"))
    function = "tests.workflows.interruptible:half_of_its_own"
    if callback is None:
        replay(WELL, function, precision="bf16")
    else:
        with pytest.raises(UserCodeError):
            replay(WELL, function, precision="bf16")
    assert_untouched(function="half_of_its_own")
