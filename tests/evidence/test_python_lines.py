from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.evidence.python_lines import autocast_step, exact, fitting, literal

values = st.recursive(
    st.one_of(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
)


@given(values)
def test_a_literal_is_the_value_in_one_line_of_printable_ascii(value):
    text = literal(value)
    assert ast.literal_eval(text) == value
    assert text.isascii()
    assert text.isprintable()


@given(st.lists(st.text(), max_size=12))
def test_a_list_is_the_same_on_one_line_and_on_many(names):
    lines = fitting("names = ", names, "  # end")
    assert len(lines) <= len(names) + 2
    assert all(len(line) <= 88 or len(ast.literal_eval(f"({line.strip()})")) == 1 for line in lines[1:-1])
    assert ast.literal_eval("\n".join(lines).removeprefix("names = ").removesuffix("  # end")) == names


@pytest.mark.parametrize(("dtype", "opens"), [("bfloat16", True), ("float32", False)])
def test_a_step_in_fp32_opens_no_autocast(dtype, opens):
    step = "\n".join(autocast_step("cuda", dtype, "not float16"))
    compile(step, "step", "exec")
    assert ('with torch.autocast("cuda", dtype=torch.bfloat16):  # not float16' in step) == opens


@pytest.mark.parametrize("number", [2.0**24, 2.0**-20, 65536, 1.0006933874625807, 1e30, 3.0])
def test_a_setting_keeps_every_digit(number):
    assert ast.literal_eval(exact(number)) == number
    assert (exact(2.0**24), exact(0.5)) == ("16777216", "0.5")
