from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.reports.escape import sanitise, sanitise_lines, sentence


@given(st.text(alphabet=st.characters()))
def test_nothing_that_acts_on_a_terminal_is_left(text):
    clean = sanitise(text)
    assert not any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in clean)
    clean.encode("utf-8")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.weight", "poids.été", "重み", "a b", "[red]"])
def test_ordinary_names_are_untouched(name):
    assert sanitise(name) == name


@pytest.mark.parametrize("hidden", "\u3164\u115f\u1160\u034f\uffa0\u17b4\u180b\ufe0f\u2800\U000e0100\U000e0fff")
def test_a_name_cannot_pass_for_another_by_a_character_that_is_not_seen(hidden):
    assert sanitise(f"head{hidden}.weight").isascii()


def test_what_is_escaped_can_be_read():
    assert sanitise("\x1b[2J\u202e\ud800\U000e0041") == r"\x1b[2J\u202e\ud800\U000e0041"


def test_lines_of_a_traceback_stay_lines():
    assert sanitise_lines("a\n\tb\x1b\rc") == "a\n    b\\x1b\\x0dc"


def test_a_sentence_is_one_line_of_bounded_length():
    assert sentence(" a\nb\x1b[2J\r ") == "a\\x0ab\\x1b[2J"
    long = sentence("cannot write " + "\n" * 100_000 + ": no")
    assert len(long) == 1000
    assert long.startswith("cannot write \\x0a")
    assert long.endswith("\\x0a: no")
