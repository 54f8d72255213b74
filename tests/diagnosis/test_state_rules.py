"""Rules on blank tensors, buffers of whole numbers, foreign objects, missing scalers and the optimizer's state."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.evidence.checkpoint_stats import (
    CheckpointSummary,
    IndexSummary,
    LogTail,
    OptimizerGroup,
    OptimizerSummary,
    ZeroSecondMoment,
)
from tests.diagnosis.summaries import moment, tensor

BLANK = {"amax": None, "amin": None, "zeros": 1024, "constant": 0.0}


def optimizer(*, steps=((100.0, 2),), starved=(), dtypes=(), **group) -> OptimizerSummary:
    settings = {"learning_rate": 1e-3, "betas": (0.9, 0.999), "epsilon": 1e-8, "parameters": 2}
    groups = (OptimizerGroup(**(settings | group)),)
    return OptimizerSummary(path="optimizer", groups=groups, steps=steps, starved=tuple(starved), step_dtypes=dtypes)


def index(**changes) -> IndexSummary:
    values = {
        "name": "emb.position_ids",
        "entry": "position_ids",
        "module": "emb",
        "group": "",
        "file": "c.pt",
        "dtype": "int64",
        "shape": (1, 512),
        "lowest": 0.0,
        "displaced": 0,
    }
    return IndexSummary(**(values | changes))


def starved(largest=1e-4, count=200, **changes) -> ZeroSecondMoment:
    values = {
        "name": "fc.weight",
        "module": "fc",
        "group": "",
        "file": "c.pt",
        "entry": "exp_avg_sq",
        "dtype": "float16",
        "starved": count,
        "examined": 1024,
        "largest": largest,
    }
    return ZeroSecondMoment(**(values | changes))


def diagnosed(*tensors, **changes):
    return judge(CheckpointSummary(format="torch-zip", tensors=tensors, **changes))


def found(*tensors, **changes) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in diagnosed(*tensors, **changes)]


def test_foreign_names_are_a_note_that_names_at_most_three():
    names = tuple(f"lib.Class{i}" for i in range(25))
    (finding,) = diagnosed(tensor(), unsafe_globals=names)
    assert (finding.code, finding.severity, finding.cause) == ("AMP109", "note", None)
    assert "lib.Class0, lib.Class1, lib.Class2 and 22 more." in finding.message
    assert finding.evidence == {"count": 25, "names": list(names[:20])}
    assert found(tensor(), unsafe_globals=()) == []


@pytest.mark.parametrize("name", ["posix.system", "subprocess.Popen", "builtins.eval", "importlib.import_module"])
def test_a_name_that_runs_code_is_a_warning_that_names_it_first(name):
    (finding,) = diagnosed(tensor(), unsafe_globals=("argparse.Namespace", name))
    assert (finding.severity, finding.evidence["runs_code"], f"asks for {name}." in finding.message) == (
        *("warning", [name]),
        True,
    )


MOVING = (moment("exp_avg", amax=1e-3), moment(amax=1e-4))


@pytest.mark.parametrize(
    "weight",
    [tensor(**BLANK), tensor(amax=1.0, amin=1.0, constant=1.0), tensor(dtype="bfloat16", **BLANK)],
    ids=["zero", "one", "bf16"],
)
def test_a_weight_that_stands_still_although_gradients_arrive(weight):
    (finding,) = diagnosed(tensor("other.weight"), weight, *MOVING, optimizers=(optimizer(),))
    assert (finding.code, finding.severity, finding.where.tensor) == ("AMP111", "warning", "fc.weight")
    assert finding.evidence["update"] == pytest.approx(1e-3 * 1e-3 / (1e-2 + 1e-8))


@pytest.mark.parametrize(
    ("weight", "moments", "state"),
    [
        (tensor(**BLANK), (), optimizer()),  # no gradient yet: LoRA's B, a zero-initialised head
        (tensor(**BLANK), (moment("exp_avg", **BLANK), moment(**BLANK)), optimizer()),
        (tensor(**BLANK), MOVING, optimizer(steps=((1.0, 2),))),  # the first step of a warm-up
        (tensor(**BLANK), MOVING, optimizer(learning_rate=0.0)),  # the end of a schedule
        (tensor(**BLANK), (moment("exp_avg", amax=1e-20), moment(amax=1e-30)), optimizer()),  # noise below epsilon
        (tensor(amax=1.0, amin=1.0, constant=1.0, dtype="bfloat16"), MOVING, optimizer()),
        (tensor(dtype="float16", **BLANK), MOVING, optimizer(learning_rate=1e-8)),
        (tensor(), MOVING, optimizer()),
    ],
)
def test_weights_that_may_be_constant_are_left_alone(weight, moments, state):
    assert found(tensor("other.weight"), weight, *moments, optimizers=(state,)) == []


HALF = tensor(dtype="float16")
ZERO_VARIANCE = tensor("bn.running_var", role="buffer", **BLANK)
HOLLOW = [tensor(f"l{i}.weight", shape=(0,), examined=0, amax=None, amin=None, zeros=0) for i in range(3)]
BLANKS = [tensor(f"l{i}.weight", **BLANK) for i in range(3)]
SMALL = tensor(shape=(2, 2), **(BLANK | {"examined": 4}))
NORM = tensor("norm.weight", shape=(32,))
COUNTER = {"entry": "num_batches_tracked", "shape": ()}
RANK = "global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("code", "severity", "tensors", "indices"),
    [
        ("AMP110", "warning", [ZERO_VARIANCE, tensor("bn.weight")], []),
        ("AMP110", "warning", [ZERO_VARIANCE], []),
        ("AMP110", "warning", [tensor()], [index(displaced=128, rounded_as="bf16")]),
        ("AMP110", "warning", [tensor()], [index(displaced=1)]),
        ("AMP106", "warning", [tensor()], [index(**COUNTER, lowest=-4.0)]),
        ("AMP112", "error", [*HOLLOW, NORM], []),
        ("AMP112", "error", [*BLANKS, NORM], []),
        ("AMP410", "note", [HALF, moment("exp_avg", dtype="float16", zeros=100)], []),
        ("AMP410", "warning", [HALF, moment("exp_avg", dtype="float16", zeros=600)], []),
        ("AMP410", "note", [HALF, moment("exp_avg", dtype="float32", zeros=600)], []),
    ],
)
def test_each_rule_catches_its_sick_case(code, severity, tensors, indices):
    assert found(*tensors, indices=tuple(indices)) == [(code, severity)]


@pytest.mark.parametrize(
    ("tensors", "changes"),
    [
        ([tensor("bn.running_var", role="buffer", zeros=900)], {}),
        ([ZERO_VARIANCE, tensor("bn.weight", **BLANK)], {}),  # pruned
        ([tensor("bn.running_mean", role="buffer", **BLANK)], {}),
        ([tensor("bn.running_var", role="buffer", **(BLANK | {"examined": 1, "zeros": 1}))], {}),
        ([tensor()], {"indices": (index(), index(displaced=512), index(**COUNTER, lowest=0.0))}),
        ([HOLLOW[0], tensor(), tensor("b.weight")], {}),
        ([dataclasses.replace(one, file=RANK) for one in HOLLOW], {}),
        ([*BLANKS, tensor()], {}),  # ControlNet's zero convolutions, adaLN-zero
        ([SMALL, SMALL], {}),
        ([HALF], {}),  # a model for inference
        ([tensor(), moment("exp_avg", zeros=600)], {}),
        ([tensor(dtype="bfloat16"), moment("exp_avg", dtype="bfloat16", zeros=600)], {}),
        ([HALF, tensor("head.weight"), moment("exp_avg", zeros=600)], {}),
        ([HALF, moment("exp_avg", dtype="float16", zeros=600)], {"log": LogTail(scale=1024.0)}),
        ([tensor(), moment("max_exp_avg_sq")], {"optimizers": (optimizer(starved=[starved()]),)}),  # it divides
    ],
)
def test_healthy_states_are_left_alone(tensors, changes):
    assert found(*tensors, **changes) == []


SICK = [
    ("AMP502", "error", optimizer(starved=[starved()])),
    ("AMP502", "warning", optimizer(starved=[starved(count=1)])),
    ("AMP502", "error", optimizer(starved=[starved(dtype="float32")])),
    ("AMP504", "error", optimizer(steps=((256.0, 2),), dtypes=("bfloat16",))),  # updates 0.475 times as long
    ("AMP504", "warning", optimizer(steps=((2048.0, 2),), dtypes=("float16",))),  # 0.933 times
    ("AMP504", "note", optimizer(steps=((256.0, 2),), dtypes=("bfloat16",), betas=(0.9, 0.95))),  # settled long ago
    ("AMP504", "note", optimizer(steps=((256.0, 2),), dtypes=("bfloat16",), fused=True)),  # loaded as fp32
    ("AMP504", "note", optimizer(steps=((40.0, 2),), dtypes=("bfloat16",))),
    ("AMP505", "error", optimizer(learning_rate=math.nan)),
    ("AMP505", "error", optimizer(betas=(0.9, 1.0))),
    ("AMP505", "error", optimizer(betas=(0.9, math.nan))),
    ("AMP505", "warning", optimizer(learning_rate=-1e-3)),
    ("AMP505", "warning", optimizer(betas=(-0.9, 0.999))),
]

HEALTHY = [
    optimizer(),
    optimizer(learning_rate=0.0),
    optimizer(learning_rate=None, epsilon=None, betas=()),  # Adafactor
    optimizer(starved=[starved(count=0, largest=0.0)]),
    optimizer(starved=[starved(largest=5e-3)], epsilon=1e-4),  # pure fp16 with the epsilon that it needs
    optimizer(starved=[starved(dtype="float32", largest=1e-17)], epsilon=1e-30),  # fp32 flushes that square itself
    optimizer(starved=[starved(dtype="float32")], betas=(0.9, 0.5)),  # the second moment is the first to forget
    optimizer(steps=((1e6, 2),), dtypes=("float32",)),
    optimizer(epsilon=0.0),
]


@pytest.mark.parametrize(("code", "severity", "sick"), SICK)
def test_each_rule_on_the_optimizer_catches_its_sick_case(code, severity, sick):
    assert found(tensor(), optimizers=(sick,)) == [(code, severity)]


@pytest.mark.parametrize("healthy", HEALTHY)
def test_healthy_optimizers_are_left_alone(healthy):
    assert found(tensor(), optimizers=(healthy,)) == []


def test_an_epsilon_of_zero_beside_zeros_is_an_error():
    assert found(tensor(), moment(zeros=3), optimizers=(optimizer(epsilon=0.0),)) == [("AMP505", "error")]


@pytest.mark.parametrize(
    ("weight", "second", "group", "codes"),
    [
        ("float16", "float16", {}, ["AMP503"]),
        ("float16", "float16", {"fused": True}, []),
        ("float16", "float16", {"epsilon": 1e-4}, []),
        ("float16", "float32", {}, []),
    ],
)
def test_an_epsilon_that_fp16_flushes(weight, second, group, codes):
    tensors = (tensor(dtype=weight), moment(dtype=second))
    assert [code for code, _ in found(*tensors, optimizers=(optimizer(**group),)) if code != "AMP410"] == codes
