"""A headless Chromium that opens reports as files, and says what they asked of it.

The browser is the machine's own (Debian's package `chromium`), driven by playwright; neither is needed by any other
test. Without them these tests are skipped, except under `make browser`, which sets AMPDOCTOR_BROWSER=required.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ampdoctor.reports.html_report import render_html
from tests.browser.pages import EVERY_VIEW, scanned

REQUIRED = os.environ.get("AMPDOCTOR_BROWSER") == "required"
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 800}
PATIENCE = 30  # seconds for what the page does in its own time, on a machine that is busy with other things


def absent(reason):
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium():
    """A running browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed: make browser")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        absent("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root, as in containers
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def report_files(tmp_path_factory):
    """Return a function that gives the address of the page of a view."""
    folder = tmp_path_factory.mktemp("pages")

    def address(name):
        path = folder / f"{name}.html"
        if not path.exists():
            report = scanned(10_000) if name == "ten_thousand" else EVERY_VIEW[name]
            path.write_text(render_html(report), encoding="utf-8")
        return path.as_uri()

    return address


@pytest.fixture
def visit(chromium, report_files):
    """Return a function that opens a view; at the end nothing may have gone wrong, or out to the network, in any."""
    contexts, complaints = [], []

    def open_page(name, *, viewport=DESK, scheme="light", **settings):
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"console: {said.text}") if said.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda asked: complaints.append(asked.url) if not harmless(asked.url) else None)
        page.goto(report_files(name))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def harmless(url):
    return url.startswith(("file:", "data:"))


def wait_until(page, holds):
    """Wait until `holds()` is true of the page; asserted at the end of PATIENCE.

    Not `page.wait_for_function`: that looks once from outside and from then on by `eval` in the page, which the page's
    own Content Security Policy refuses, so that it works only where there was nothing to wait for.
    """
    deadline = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    assert holds()


def settle(page, *, unfold=False):
    """Scroll a page to its end, so that every chart is drawn; `unfold` opens what is folded."""
    if unfold:
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.and_(page.locator("[data-drawn]")).wait_for()
    page.evaluate("window.scrollTo(0, 0)")
    return page


@pytest.fixture
def settled(visit):
    """Return a function that opens a view in which every chart is drawn."""
    return lambda name, *, unfold=False, **settings: settle(visit(name, **settings), unfold=unfold)


@pytest.fixture
def drawn(visit, report_files, tmp_path):
    """Return a function that opens a report of its own."""

    def opened(report, viewport, scheme="light"):
        path = tmp_path / "report.html"
        path.write_text(render_html(report), encoding="utf-8")
        page = visit("listed", viewport=viewport, scheme=scheme)
        page.goto(path.as_uri())
        return settle(page)

    return opened
