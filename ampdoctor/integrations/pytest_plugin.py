"""The pytest plugin: `@pytest.mark.amp_finite` and `amp_guard`. Every pytest run loads it: it imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ampdoctor.integrations.pytest_guard import AmpGuard

MARKER = "amp_finite"
PROPERTY = "ampdoctor"
"""The user property (`--junitxml`) and the report's attribute with the codes that a test failed."""


class NeverTrainsWarning(pytest.PytestWarning):
    """A marked test passed without a training step: it would pass with any numbers."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(max_skipped=None): fail the test with a diagnosis when a training step in it goes non-finite; "
        "max_skipped: steps that a GradScaler may skip in all (default: as many as it takes to settle).",
    )


@pytest.fixture
def amp_guard() -> AmpGuard:
    """Fail the test with a diagnosis: of the steps in a block of it, or of a run that is replayed."""
    from ampdoctor.integrations.pytest_guard import AmpGuard

    return AmpGuard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch a marked test while it runs."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    options = _options(marker)
    from ampdoctor.integrations.pytest_guard import AmpGuard

    with AmpGuard()(**options) as watch:
        outcome = yield
    if not watch.trained:
        item.warn(
            NeverTrainsWarning(f"{item.name} is marked {MARKER}, and no backward or optimizer step was seen in it")
        )
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Store the codes that a test failed in its report, where xdist keeps them."""
    report = yield
    codes = _told(call.excinfo) if call.when == "call" else []
    if codes and report.failed:
        setattr(report, PROPERTY, codes)
        for noted in (item, report):  # --junitxml reads the teardown's report, which has the item's properties
            noted.user_properties.append((PROPERTY, " ".join(codes)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> Any:
    """Show "N" and "NONFINITE" for such failures, which count as failed."""
    if report.failed and getattr(report, PROPERTY, None):
        return "failed", "N", ("NONFINITE", {"red": True})
    return None


def _told(ended: pytest.ExceptionInfo[BaseException] | None) -> list[str]:
    """Return the codes of the guard's failure in an exception: itself, its causes, or its group."""
    return list(dict.fromkeys(_codes(ended.value))) if ended is not None else []


def _codes(error: BaseException | None) -> Iterator[str]:
    guard = sys.modules.get("ampdoctor.integrations.pytest_guard")
    if error is None or guard is None:
        return
    if isinstance(error, guard.NonFinite):
        error.told = True
        yield from error.codes
        return
    for inner in (error.__cause__, *getattr(error, "exceptions", ())):
        yield from _codes(inner)


def _options(marker: pytest.Mark) -> dict[str, Any]:
    """Return the arguments of the marker; fail the test for unknown ones."""
    known = {"max_skipped"}
    value = marker.kwargs.get("max_skipped")
    if wrong := [*map(repr, marker.args), *sorted(set(marker.kwargs) - known)]:
        pytest.fail(f"@pytest.mark.{MARKER} takes nothing but max_skipped=N, and no {', '.join(wrong)}", pytrace=False)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        pytest.fail(f"@pytest.mark.{MARKER}(max_skipped={value!r}): a number of steps, or None", pytrace=False)
    return dict(marker.kwargs)
