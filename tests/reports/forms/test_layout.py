from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ampdoctor.reports import human as layout

NAME = "transformer_encoder_layers.3.feed_forward_network.0.weight"


def shown(renderable, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_name_is_folded_at_its_dots():
    assert shown(layout.Folded(Text(NAME)), 40) == [
        "transformer_encoder_layers.3.",
        "feed_forward_network.0.weight",
    ]
    assert shown(layout.Folded(Text(NAME)), 22) == [
        "transformer_encoder_",
        "layers.3.",
        "feed_forward_network.",
        "0.weight",
    ]


def test_lines_after_the_first_hang():
    assert shown(layout.Folded(Text("one two three four"), hang=2), 9) == ["one two", "  three", "  four"]


@given(st.text(st.sampled_from("abc ./_-層\u0301"), max_size=60), st.integers(2, 30), st.integers(0, 3))
def test_nothing_is_lost_and_no_line_is_too_long(text, width, hang):
    hang = hang if width > 2 * hang else 0
    at = layout.breaks(text, width, hang)
    assert at == sorted(set(at))
    assert all(0 < offset < len(text) for offset in at)
    parts = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
    assert "".join(parts) == text
    assert all(cell_len(part.rstrip()) <= width - (hang if index else 0) for index, part in enumerate(parts))
