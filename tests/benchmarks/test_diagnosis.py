"""The comparison of diagnoses is fair: one measure for all, and a tool that cannot answer is said to be so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import anomaly, by_hand, op_modes, transformers_hooks
from benchmarks.peers.answer import Answer, opened
from benchmarks.peers.scoring import Mark, Outcome, mark, score, spelled
from benchmarks.peers.tools import TOOLS
from fixtures.corpus import runs

ROOT = Path(__file__).resolve().parents[2]
LINEAR = "t5_ffn_wo_overflow"
RIGHT = Answer(step=3, module="encoder.block.1.layer.1.DenseReluDense.wo", op="Linear", causes=("forward_overflow",))
NOTHING = Mark(step=False, module=False, op=False, cause=False)

# libraries of the corpus speak up while their models are built; none of it is ours
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def diagnosis():
    spec = importlib.util.spec_from_file_location("benchmark_diagnosis", ROOT / "benchmarks" / "diagnosis.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("aten.mul.Tensor", "__imul__"),
        ("aten.mul_.Tensor", "MulBackward0"),
        ("aten.div", "__truediv__"),
        ("aten._to_copy.default", "to"),
        ("aten.layer_norm", "NativeLayerNormBackward0"),
        ("aten.binary_cross_entropy", "aten.binary_cross_entropy_backward.default"),
        ("aten.addcdiv_", "aten._foreach_addcdiv_.ScalarList"),
        ("state:weight", "state:weight"),
    ],
)
def test_one_op_has_many_spellings(one, other):
    assert spelled(one) == spelled(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("aten.log", "LogSoftmaxBackward0"), ("aten.mul", "aten.mm"), ("state:weight", "weight"), ("aten.add", "addcdiv")],
)
def test_other_ops_do_not(one, other):
    assert spelled(one) != spelled(other)


def test_each_part_of_an_answer_is_judged_alone():
    label = runs.label(LINEAR)
    assert mark(label, RIGHT) == Mark(step=True, module=True, op=True, cause=True)
    assert mark(label, RIGHT).place
    late = Answer(step=4, module=RIGHT.module)
    assert mark(label, late) == Mark(step=False, module=True, op=False, cause=False)
    assert mark(label, Answer(step=3, module="encoder.block.1", op="log", causes=("bad_data",))) == Mark(
        step=True, module=False, op=False, cause=False
    )
    assert mark(label, None) == NOTHING


def test_a_score_counts_sick_and_healthy_apart():
    cases = (
        LINEAR,
        "moe_idle_expert_mean",
        "exp_before_clamp",
        "healthy_dead_relu_zero_grads",
        "healthy_sparse_embedding",
    )
    labels = {case: runs.label(case) for case in cases}
    outcomes = [
        Outcome(cases[0], RIGHT, 1.0),
        Outcome(cases[1], None, 2.0),
        Outcome(cases[2], None, 9.0, "it raised"),
        Outcome(cases[3], Answer(step=0), 3.0),
        Outcome(cases[4], None, 4.0),
    ]
    sums = score(labels, outcomes)
    assert (sums.sick, sums.healthy) == (3, 2)
    assert (sums.step, sums.module, sums.op, sums.place, sums.cause) == (1, 1, 1, 1, 1)
    assert (sums.silent, sums.false_alarms, sums.failures) == (1, 1, 1)
    assert sums.seconds == 3.0
    with pytest.raises(ValueError, match="without an outcome"):
        score(labels, outcomes[1:])


def test_the_label_itself_is_a_full_score():
    for label in map(runs.label, runs.case_ids()):
        place = {"step": label["step"], "module": label["culprit_module"], "op": label["culprit_op"]}
        if label["kind"] != "healthy":
            answer = Answer(**place, causes=(label["kind"],))
            assert mark(label, answer) == Mark(step=True, module=True, op=True, cause=True), label


@pytest.mark.parametrize(
    ("tool", "case", "expected"),
    [
        (by_hand.loss_and_gradients, LINEAR, (3, None, None)),
        (by_hand.loss_and_gradients, "triplet_sqrt_clamp_1e12", (0, None, None)),
        (anomaly.detect_anomaly, "triplet_sqrt_clamp_1e12", (0, "", "sqrt")),
        (anomaly.detect_anomaly, "fp8_e5m2_wrong_max", (0, "blocks.1.fc1", "fp8linear")),
        (op_modes.isfinite_of_every_op, "groupnorm_manual_square", (0, "layers.3.norm", "mul")),
        (op_modes.isfinite_of_every_op, "static_loss_scale_overflow", (0, "head", "mm")),
        (op_modes.isnan_of_every_op, "groupnorm_manual_square", (0, "layers.3.norm", "sub")),
        (transformers_hooks.debug_underflow_overflow, LINEAR, (3, RIGHT.module, None)),
        (
            transformers_hooks.debug_underflow_overflow,
            "bf16_checkpoint_saved_as_fp16",
            (0, "encoder.block.1.layer.0.layer_norm", "state:weight"),
        ),
    ],
)
def test_a_peer_answers_as_it_is_known_to(tool, case, expected):
    with opened(case) as made:
        answer = tool(made)
    assert (answer.step, answer.module, answer.op and spelled(answer.op)) == expected


@pytest.mark.slow
def test_the_table_of_a_run(diagnosis, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(diagnosis, "PEERS_PYTHON", Path(sys.executable))
    details = tmp_path / "details.jsonl"
    cases = ["groupnorm_manual_square", "healthy_dead_relu_zero_grads"]
    chosen = [f"--tool={tool}" for tool in ("isfinite", "ampdoctor")] + [f"--case={case}" for case in cases]
    monkeypatch.setattr(sys, "argv", ["diagnosis.py", *chosen, "--details", str(details)])
    diagnosis.main()
    said = capsys.readouterr().out
    assert "1 failures and 1 healthy controls" in said
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    assert rows[2][0] == TOOLS["ampdoctor"].title
    assert rows[2][1:9] == ["1", "1", "1", "1", "1", "0", "0", "0"]
    assert rows[3][1:9] == ["1", "1", "1", "1", "-", "0", "0", "0"]
    read = [json.loads(line) for line in details.read_text().splitlines()]
    assert [(one["tool"], one["case"]) for one in read] == [
        (TOOLS[tool].title, case) for tool in ("isfinite", "ampdoctor") for case in cases
    ]


@pytest.mark.slow
def test_a_tool_that_raises_hangs_or_dies_fails_in_that_case_alone():
    script = """
import os, time
from benchmarks.peers import answer, worker
with answer.opened("healthy_dead_relu_zero_grads"):
    pass  # what a run imports is imported before the first fork
def raises(case): raise KeyError("what")
for tool in (raises, lambda case: time.sleep(600), lambda case: os._exit(7), lambda case: None):
    outcome = worker.outcome(tool, "healthy_dead_relu_zero_grads", 5.0)
    print(outcome.answer, outcome.failure)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "None KeyError: 'what'",
        "None no answer in 5 s",
        "None its process ended with exit code 7",
        "None None",
    ]
