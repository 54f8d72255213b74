"""Size and opening time of the HTML report of a 12-block transformer's profile, in headless Chromium; time of a sort.

Run: make browser once, then python benchmarks/html_report.py [--steps 50] [--opens 5]

Needs the extra `browser` and a Chromium (Debian: apt-get install chromium). The time is that of the page's own clock,
from the start of the navigation until it has loaded and its first chart is drawn; the median of several openings, each
in a browser context of its own. The sort is of the table of a scan of 10,000 tensors, by name: the median of several.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Browser, sync_playwright
from safetensors.torch import save_file

from ampdoctor import ReplayRequest, profile, scan
from ampdoctor.reports.html_report import render_html

HERE = Path(__file__).parent
LIMIT_MB, LIMIT_MS, LIMIT_SORT_MS = 6.0, 2000.0, 1000.0

_DRAWN = """() => new Promise((done) => {
    const drawn = () => document.querySelector(".chart[data-drawn]");
    const look = () => (drawn() ? done(performance.now()) : requestAnimationFrame(look));
    look();
})"""

_SORTED = """() => {
    const start = performance.now();
    document.querySelector("#tensors-view th button").click();
    return performance.now() - start;
}"""


def measure(browser: Browser, address: str) -> tuple[float, float]:
    """Return the milliseconds until the load event and until the first chart is drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 2400})
    page = context.new_page()
    page.goto(address, wait_until="commit")
    drawn = page.evaluate(_DRAWN)
    page.wait_for_load_state("load")
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    context.close()
    return float(loaded), float(drawn)


def sorting(browser: Browser, folder: Path, times: int) -> float:
    """Return the milliseconds that a click on a heading takes in the report of a scan of 10,000 tensors."""
    checkpoint, report = folder / "model.safetensors", folder / "scan.html"
    save_file({f"layers.{index}.weight": torch.full((4,), float(index + 1)) for index in range(10_000)}, checkpoint)
    report.write_text(render_html(scan(checkpoint)), encoding="utf-8")
    page = browser.new_page()
    page.goto(report.as_uri())
    return statistics.median(float(page.evaluate(_SORTED)) for _ in range(times))


def main() -> int:
    """Print size and time; 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--opens", type=int, default=5)
    options = parser.parse_args()
    request = ReplayRequest(factory=f"{HERE / 'training' / 'gpt.py'}:make_run_12", steps=options.steps)
    page = render_html(profile(request))
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times = [measure(browser, path.as_uri()) for _ in range(options.opens)]
        sort = sorting(browser, Path(folder), options.opens)
        browser.close()
    size = len(page.encode()) / 1e6
    loaded, drawn = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"size {size:.2f} MB (limit {LIMIT_MB:g})")
    print(f"load event {loaded:.0f} ms, first chart drawn {drawn:.0f} ms (limit {LIMIT_MS:g})")
    print(f"a sort of 10,000 tensors {sort:.0f} ms (limit {LIMIT_SORT_MS:g})")
    return int(size > LIMIT_MB or max(loaded, drawn) > LIMIT_MS or sort > LIMIT_SORT_MS)


if __name__ == "__main__":
    sys.exit(main())
