"""The plugin, by running pytest with it on small tests of its own."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ampdoctor.package import FOLDER
from tests.integrations.plugin_runs import LOOP, PLUGIN, marked

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).with_name("samples")

SICK = f"""{LOOP}
@pytest.mark.amp_finite
def test_overflow():
    train(torch.ones(4, 8) * 2000)
"""
SICK_LOOPS = {
    "test_nan_in_a_batch": ("AMP204", "the batch holds NaN before the forward, first at index [0, 1] (1 of 6 values)"),
    "test_derivative_of_a_root": ("AMP202", "(backward of aten.sqrt in"),
    "test_past_the_scaler": ("AMP407", "4 gradients that are still scaled by 16,777,216"),
    "test_scale_never_updated": ("AMP405", "scaler.update() is never called"),
    "test_without_an_optimizer": ("AMP202", "(backward of aten.sqrt in"),
    "test_own_check": ("AMP202", "the test raised: AssertionError: bad loss"),
    "test_swallowed": ("AMP202", "aten.log"),
}
"""By sample: its code, and words of its diagnosis."""


def test_a_sick_test_fails_with_its_diagnosis_also_in_xml(run, pytester):
    result = run(SICK, "-v", "--junitxml=out.xml")
    case = ET.parse(pytester.path / "out.xml").find(".//testcase")
    assert "AMP201 forward-overflow" in case.find("failure").get("message")
    assert "test_it.py:13" in case.find("failure").text
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_overflow NONFINITE*",
            "ERROR  step 0  test_it.py:13  A forward value does not fit fp16",
            "FIX*(verified by replay)",
            "WHY*ampdoctor rule AMP201",
            "*where*step 0, *; forward;*aten.pow,",
            "NONFINITE test_it.py::test_overflow - NonFinite: *AMP201*",
            "*1 failed*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert str(FOLDER) not in result.stdout.str()  # none of our own lines is shown


def test_health_passes(run):
    text = (SAMPLES / "healthy_loops.py").read_text(encoding="utf-8")
    strict = ["-W", "error::UserWarning", "-W", f"ignore::{PLUGIN}.NeverTrainsWarning"]  # some have nothing to train
    run(text, *strict).assert_outcomes(passed=text.count("\ndef test_"))


def test_each_diagnosis_names_the_cause(run):
    text = (SAMPLES / "sick_loops.py").read_text(encoding="utf-8")
    shown = run(text).stdout.str()
    for name, (code, said) in SICK_LOOPS.items():
        diagnosis = " ".join(re.search(rf"_ {name} _+\n(.*?)(?:\n_____|\n=====)", shown, re.DOTALL).group(1).split())
        assert f"ampdoctor rule {code} " in diagnosis, diagnosis
        assert said in diagnosis, diagnosis
    assert set(SICK_LOOPS) == set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def test_the_number_of_skipped_steps_can_be_bounded(run):
    body = "train(torch.randn(4, 8), init_scale=2.0**24, steps=10)"
    result = run(marked(body, marker="@pytest.mark.amp_finite(max_skipped=1)"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AMP405*step 1*", "*skipped by the scaler so far: 2 steps*"])
    bounded = marked(body, marker="@pytest.mark.amp_finite(max_skipped=10)")
    run(f"{bounded}\n\n@pytest.mark.amp_finite\ndef test_settles():\n    {body}\n").assert_outcomes(passed=2)


def test_a_marked_test_that_never_trains_is_warned_of(run):
    text = marked("nn.Linear(2, 2)(torch.ones(1, 2))", "train(torch.randn(4, 8))", "pytest.skip('no')")
    result = run(text, "-W", "always::pytest.PytestWarning")
    result.assert_outcomes(passed=2, skipped=1, warnings=1)
    result.stdout.fnmatch_lines(["*NeverTrainsWarning: test_0 is marked amp_finite, and no backward *"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("(3)", " takes nothing but max_skipped=N, and no 3"),
        ("(max_skiped=1)", " takes nothing but max_skipped=N, and no max_skiped"),
        ("(max_skipped=-1)", "(max_skipped=-1): a number of steps, or None"),
    ],
)
def test_wrong_arguments_of_the_mark_are_one_sentence(run, arguments, said):
    result = run(marked("pass", marker=f"@pytest.mark.amp_finite{arguments}"))
    result.assert_outcomes(failed=1)
    assert f"@pytest.mark.amp_finite{said}\n" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_another_failure_of_a_marked_test_stays_as_it_is(run):
    result = run(marked("assert nn.Linear(2, 2)(torch.ones(1, 2)).sum() == 77"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">*== 77", "FAILED *"])


def test_expected_failures_and_skips_stay_what_they_are(run):
    text = marked("train(torch.ones(4, 8) * 2000)", marker="@pytest.mark.xfail(strict=True)\n@pytest.mark.amp_finite")
    run(text + "\n\n@pytest.mark.amp_finite\ndef test_skip():\n    pytest.skip('no')\n").assert_outcomes(
        xfailed=1, skipped=1
    )


@pytest.mark.slow
def test_workers_tell_the_same(run_apart):
    result = run_apart(SICK + "\n\ndef test_good():\n    pass\n", "-n", "2", "-v")
    assert result.ret == 1
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*NONFINITE*test_overflow*", "*AMP201*", "NONFINITE *test_overflow*"])


def test_the_guard_watches_a_part_of_a_test(run):
    text = f"""{LOOP}
def test_sick_part(amp_guard):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    (model(torch.ones(1, 8)) * float("nan")).sum().backward()  # before the guard
    optimizer.zero_grad()
    with amp_guard(model, optimizer=optimizer):
        model.up(torch.ones(1, 8)).mul(0).log().sum().backward()

def test_healthy_part(amp_guard):
    with amp_guard(max_skipped=0):
        train(torch.randn(4, 8))
    (Net()(torch.ones(1, 8)) * float("nan")).sum().backward()

@pytest.mark.amp_finite
def test_inside_a_watched_test(amp_guard):
    model = Net()
    with amp_guard(model, optimizer=torch.optim.SGD(model.parameters(), 1e-3)):
        (model.down(torch.ones(1, 32)) * 0).log().sum().backward()
"""
    result = run(text)
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["*_ test_sick_part _*", "*AMP202*", "*_ test_inside_a_watched_test _*", "*AMP202*"])


@pytest.mark.slow
def test_the_guard_replays_a_run_and_shows_the_proven_cure(run, tmp_path):
    text = f"""{LOOP}
from ampdoctor import TrainingRun

def make_run(size=2000.0):
    model = Net()
    return TrainingRun(
        model=model, batches=[torch.ones(4, 8) * size for _ in range(4)], scaler={{}},
        loss=lambda model, x: model(x).float().pow(2).mean(), optimizer=torch.optim.SGD(model.parameters(), 1e-9),
    )

def test_factory(amp_guard):
    amp_guard.run(make_run, steps=2)

def test_healthy(amp_guard):
    report = amp_guard.run(make_run, steps=2, arguments={{"size": 1.0}})
    assert report.verdict == "healthy" and report.run["steps"] == 2
"""
    result = run(text)
    result.assert_outcomes(failed=1, passed=1)
    shown, _, summary = result.stdout.str().partition("short test summary info")  # which tells it all where CI is set
    assert shown.count("verdict: sick") == 1
    assert "verified by replay" in shown
    assert "NONFINITE test_it.py::test_factory - NonFinite: AMP201 " in summary
    assert "with -v" not in shown  # nobody could ask for it


def test_the_mark_and_the_fixture_are_listed(run):
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.amp_finite(max_skipped=None): *"])
    run("", "--fixtures").stdout.fnmatch_lines(["amp_guard*"])


def test_a_run_that_does_not_use_it_pays_nothing(run_apart):
    text = """
import sys

def test_nothing_was_loaded():
    assert "torch" not in sys.modules
    assert "numpy" not in sys.modules
    assert not {"rich", "ampdoctor.workflows", "ampdoctor.reports", "ampdoctor.replay"} & set(sys.modules)
"""
    run_apart(text).assert_outcomes(passed=1)


def test_the_package_announces_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"ampdoctor": PLUGIN}


# -- what a watched test makes of its failure: swallows it, wraps it, sets itself aside, is a fixture's

SWALLOWED = """
    try:
        train(torch.ones(4, 8) * 2000)
    except BaseException:
        pass
    """
SET_ASIDE = ("pytest.skip('later')", "pytest.xfail('later')", "raise __import__('unittest').SkipTest('later')")


def test_a_failure_that_was_swallowed_is_not_set_aside_after_it(run):
    result = run(marked(*(f"{SWALLOWED}{aside}" for aside in SET_ASIDE)))
    result.assert_outcomes(failed=len(SET_ASIDE))
    result.stdout.fnmatch_lines(["*AMP201*", "NONFINITE *"])


def test_a_healthy_test_may_be_set_aside_after_its_steps(run):
    run(marked(*(f"train(torch.ones(4, 8))\n    {aside}" for aside in SET_ASIDE))).assert_outcomes(xfailed=1, skipped=2)


def test_an_expected_failure_that_was_swallowed_is_the_expected_one(run):
    mark = "@pytest.mark.xfail(strict=True)\n@pytest.mark.amp_finite"
    run(marked(f"{SWALLOWED}pytest.skip('later')", marker=mark)).assert_outcomes(xfailed=1)


ENDINGS = f"""{LOOP}
@pytest.fixture
def guarded(amp_guard):
    with amp_guard():
        yield

def overflow():
    train(torch.ones(4, 8) * 2000)

def test_expected_and_then_another(amp_guard):
    with pytest.raises(pytest.fail.Exception), amp_guard():
        overflow()
    assert 1 + 1 == 3

def test_wrapped(amp_guard):
    with amp_guard():
        try:
            overflow()
        except BaseException as error:
            raise RuntimeError("training ended") from error

@pytest.mark.amp_finite
def test_swallowed():
    try:
        overflow()
    except BaseException:
        pass

@pytest.mark.amp_finite
def test_subtests(subtests):
    for size in (1.0, 2000.0):
        with subtests.test(size=size):
            train(torch.ones(4, 8) * size)

def test_in_a_fixture(guarded):
    overflow()

def test_swallowed_in_a_fixture(guarded):
    try:
        overflow()
    except BaseException:
        pass
"""


def test_a_failure_is_told_once_and_by_the_test_that_fails_so(run, pytester):
    result = run(ENDINGS, "--junitxml=out.xml", "-rA", "--tb=no")
    lines = {line.split(" - ")[0] for line in result.stdout.str().partition("test summary info")[2].splitlines()}
    expected = {
        "test_expected_and_then_another": "FAILED",
        "test_wrapped": "NONFINITE",
        "test_swallowed": "NONFINITE",
        "test_in_a_fixture": "NONFINITE",
        "test_swallowed_in_a_fixture": "ERROR",  # which has ended by then
    }
    assert {f"{word} test_it.py::{name}" for name, word in expected.items()} <= lines
    assert "ERROR test_it.py::test_in_a_fixture" not in lines
    noted = {
        case.get("name"): [p.get("value") for p in case.iter("property") if p.get("name") == "ampdoctor"]
        for case in ET.parse(pytester.path / "out.xml").iter("testcase")
    }
    told = {"test_wrapped", "test_swallowed", "test_subtests", "test_in_a_fixture"}
    assert {name: codes for name, codes in noted.items() if codes} == {name: ["AMP201"] for name in told}
