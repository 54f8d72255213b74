from __future__ import annotations

from ampdoctor.reports.github import render_markdown
from tests.samples import SICK


def test_the_report_is_appended_to_the_summary_of_the_step(typed, behaving, tmp_path):
    behaving("sick")
    file = tmp_path / "summary.md"
    file.write_text("# before\n")
    result = typed("scan", "x", "--github-summary", env={"GITHUB_STEP_SUMMARY": str(file)})
    assert result.returncode == 1
    assert "AMP201" in result.stdout  # the report itself goes where it went
    assert file.read_text() == f"# before\n\n{render_markdown(SICK)}"


def test_it_needs_a_step_and_says_so_before_any_work(typed, behaving):
    behaving("crash")
    result = typed("scan", "x", "--github-summary", env={"GITHUB_STEP_SUMMARY": ""})
    assert (result.returncode, result.stdout) == (2, "")
    assert "GITHUB_STEP_SUMMARY is not set" in result.stderr
