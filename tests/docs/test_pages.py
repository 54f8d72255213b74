"""Every page of docs/ says what is so: its code runs, and its commands print what it shows."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, blocks, is_slow, missing, pages, rewritten, same

RUNNABLE = {"python", "console"}


def runnable_pages():
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if any(block.is_run for block in blocks(text)):
            marks = [pytest.mark.slow] if is_slow(text) else []
            yield pytest.param(page, id=str(page.relative_to(DOCS)), marks=marks)


def commands_and_options(page):
    """What a page runs: each command, and each command with each of its options; a page of Python is its own."""
    run = [block for block in blocks(page.read_text(encoding="utf-8")) if block.is_run]
    yield from (page for block in run if block.language == "python")
    for command, rest in re.findall(r"(ampdoctor [a-z-]+|python)([^&|;\n]*)", "".join(block.text for block in run)):
        yield command
        yield from ((command, option) for option in re.findall(r"--[a-z-]+", rest))


@pytest.mark.each_value_once(of=commands_and_options)
@pytest.mark.parametrize("page", list(runnable_pages()))
def test_the_commands_of_the_page_print_what_it_shows(page, tmp_path, python):
    text = page.read_text(encoding="utf-8")
    if lacking := missing(text):
        pytest.skip(f"needs {' and '.join(lacking)}; `make scalers` runs it")
    made = rewritten(text, tmp_path, python)
    for shown, now in zip(blocks(text), blocks(made), strict=True):
        assert same(shown.text, now.text), f"--- the page\n{shown.text}\n--- now\n{now.text}"


def test_every_block_of_code_is_run_or_says_why_not():
    unmarked = [
        (page.name, block.text)
        for page in pages()
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language in RUNNABLE and not (block.is_run or block.mark.startswith(("file: ", "not run: ")))
    ]
    assert unmarked == []


PAGE = """# A page

<!-- file: said.py -->
```python
print("1.00 apples")
print("and pears")
print("and plums")
print("next: more")
```

<!-- run: exit 3; until "and pl"; from "next" -->
```console
$ true
$ python said.py; exit 3
1.00 apples
and pears
...
next: more
```
"""


def test_a_page_that_is_so_stays_as_it_is(tmp_path):
    assert rewritten(PAGE, tmp_path) == PAGE


def test_an_output_that_is_not_so_is_written_anew(tmp_path):
    stale = PAGE.replace("1.00 apples\nand pears", "2.00 apples")
    assert rewritten(stale, tmp_path) == PAGE
    assert not same(stale, PAGE)


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        ("9.267e+04 in a", "9.268e+04\nin  a", True),
        ("scale=1024.0,", "scale=1030.5,", True),
        ("step 9,", "step 10,", False),
        ("block.0", "block.1", False),
        ("torch 2.13.0+cpu, threads", "torch 2.13.0, threads", True),
        ("healthy", "sick", False),
        ("one", "one more", False),
    ],
)
def test_words_count_and_small_differences_of_numbers_do_not(left, right, alike):
    assert same(left, right) is alike
