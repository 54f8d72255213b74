"""The check of the site's links finds what is broken, and nothing else."""

from __future__ import annotations

from docs.check_links import broken_links, broken_sources
from tests.docs.pages import DOCS


def test_a_site_whose_links_all_lead_somewhere_is_clean(tmp_path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "style.css").touch()
    (tmp_path / "index.html").write_text(
        '<link href="style.css"><a href="rules/a.html#here">a</a><a href="#top">b</a><p id="top"></p>'
        '<a href="https://example.org/nowhere">c</a><a href="mailto:a@example.org">d</a>'
    )
    (tmp_path / "rules" / "a.html").write_text('<a name="here"></a><a href="../index.html">up</a>')
    assert list(broken_links(tmp_path)) == []


def test_a_link_to_no_file_and_one_to_no_place_are_named(tmp_path):
    (tmp_path / "index.html").write_text('<a href="gone.html">a</a><a href="#gone">b</a><img src="gone.png">')
    assert list(broken_links(tmp_path)) == [
        "index.html: gone.html leads to no file",
        "index.html: #gone leads to no place on that page",
        "index.html: gone.png leads to no file",
    ]


def test_the_pages_of_the_repository_lead_somewhere():
    assert list(broken_sources(DOCS)) == []
