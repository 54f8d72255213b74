from __future__ import annotations

import random

from ampdoctor.evidence.log_records import DetailLine
from ampdoctor.health.heat_maps import MOST_COLUMNS, MOST_ROWS, Maps
from tests.health.logs import NAMES, detail


def maps_of(lines, names=NAMES):
    maps = Maps()
    for line in lines:
        maps.add(line, names)
    return maps


def test_a_row_a_tensor_and_a_column_a_step():
    maps = maps_of([detail(0, 1.0, 2.0, zero_share=0.5), detail(10, 3.0), detail(20, None, 4.0)])
    norm, zeros = maps.heat_maps()
    assert (norm.name, norm.role, norm.steps, norm.tensors, norm.of) == ("norm", "gradient", (0, 10, 20), NAMES, 2)
    assert norm.values == ((1.0, 3.0, None), (2.0, None, 4.0))
    assert (zeros.name, zeros.values) == ("zero_share", ((0.5,), (0.5,)))


def test_calls_of_one_module_are_one_row_and_a_table_that_grows_or_changes_keeps_rows_by_name():
    maps = maps_of([detail(5, 1.0), detail(5, None, 2.0)])
    maps.add(DetailLine(step=6, tensors=detail(6, 1.0).tensors * 2), NAMES)
    maps.add(detail(7, 3.0, 4.0, 5.0), ("b.weight", "a.weight", "c.weight"))
    (norm,) = maps.heat_maps()
    assert norm.tensors == ("a.weight", "b.weight", "c.weight")
    assert norm.values == ((1.0, 1.0, 4.0), (2.0, None, 3.0), (None, None, 5.0))


def test_of_many_columns_the_worst_stay():
    draw = random.Random(1)
    lines = [detail(at, 2.0 ** draw.gauss(0, 0.1), 1.0, log2_headroom=8 + draw.random()) for at in range(5000)]
    lines[1234] = detail(1234, 1.0, 4096.0, log2_headroom=8.5)
    lines[4321] = detail(4321, 1.0, 1.0, log2_headroom=0.25)
    maps = maps_of(lines)
    norm, headroom = maps.heat_maps()
    assert len(norm.steps) <= MOST_COLUMNS
    assert norm.values[1][norm.steps.index(1234)] == 4096.0
    assert headroom.values[0][headroom.steps.index(4321)] == 0.25
    assert norm.steps == tuple(sorted(set(norm.steps)))
    assert len(maps.headroom) == 5000
    assert maps.headroom[4321] == 0.25


def test_of_many_rows_the_worst_stay_in_their_order():
    names = tuple(f"t{at}" for at in range(500))
    norms = [1.0] * 500
    lines = [detail(at, *norms) for at in range(3)]
    norms[77] = norms[401] = 1000.0
    norm = maps_of([*lines, detail(3, *norms)], names).heat_maps()[0]
    assert (len(norm.tensors), norm.of) == (MOST_ROWS, 500)
    assert {"t77", "t401"} <= set(norm.tensors)
    assert list(norm.tensors) == sorted(norm.tensors, key=lambda name: int(name[1:]))


def test_steps_that_were_undone_are_forgotten():
    maps = maps_of([detail(at, 1.0, log2_headroom=3.0) for at in range(5)])
    maps.forget_from(2)
    maps.add(detail(2, 9.0), NAMES)
    norm = maps.heat_maps()[0]
    assert (norm.steps, norm.values) == ((0, 1, 2), ((1.0, 1.0, 9.0),))
    assert set(maps.headroom) == {0, 1}
