"""The check of the site's links finds what is broken, and nothing else."""

from __future__ import annotations

from docs.check_links import broken_links, broken_sources
from tests.docs.pages import DOCS


def test_a_link_to_no_file_and_one_to_no_place_are_named(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="gone.html">a</a><a href="#gone">b</a><img src="gone.png"><a href="here.html#there">c</a>'
        '<a href="https://example.org/nowhere">d</a><a href="mailto:a@example.org">e</a>'
    )
    (tmp_path / "here.html").write_text('<a name="there"></a><a href="index.html">up</a>')
    assert list(broken_links(tmp_path)) == [
        "index.html: gone.html leads to no file",
        "index.html: #gone leads to no place on that page",
        "index.html: gone.png leads to no file",
    ]


def test_the_pages_of_the_repository_lead_somewhere():
    assert list(broken_sources(DOCS)) == []
