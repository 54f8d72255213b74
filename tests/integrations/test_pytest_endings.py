"""What a watched test makes of its failure: swallows it, wraps it, sets itself aside, is a fixture's."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tests.integrations.plugin_runs import LOOP, marked

pytest_plugins = ["pytester"]

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


def test_a_method_of_unittest_cannot_set_aside_what_it_swallowed(run):
    text = f"""{LOOP}
import unittest

@pytest.mark.amp_finite
class TestIt(unittest.TestCase):
    def test_swallowed(self):
        try:
            train(torch.ones(4, 8) * 2000)
        except BaseException:
            pass
        self.skipTest("later")

    def test_healthy(self):
        train(torch.ones(4, 8))
        self.skipTest("later")

    @unittest.expectedFailure
    def test_expected(self):
        train(torch.ones(4, 8) * 2000)
"""
    result = run(text)
    result.assert_outcomes(failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*AMP201*", "NONFINITE *test_swallowed*"])


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
