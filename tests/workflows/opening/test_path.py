"""The path of a report: from what fed an origin over the modules that carry it to what is affected, with ranges."""

from __future__ import annotations

import pytest

from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.trace import NonFiniteOrigin, PathOp, PropagationPath
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.report_notes import MOST_CARRIERS, path_section
from tests.corpus.reports import diagnosed, of_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def nodes_of(path, role):
    return [node for node in path["nodes"] if node["role"] == role]


@pytest.mark.parametrize(
    ("case", "target"),
    [
        of_case("groupnorm_manual_square", "loss"),  # born in a forward
        of_case("nan_pixel_in_batch", "loss"),  # came with the batch
        of_case("adam_eps_half_embedding", "param:"),  # born in the optimizer
        of_case("static_loss_scale_overflow", "grad:"),
    ],
)
def test_the_birth_is_that_of_the_finding_and_the_last_node_is_affected(case, target, check_report):
    report = diagnosed(case)
    text = render_json(report)
    path = check_report(text)["path"]
    finding = report.findings[0]
    assert path["fingerprint"] == finding.fingerprint
    (origin,) = nodes_of(path, "origin")
    where = finding.where
    assert (origin["phase"], origin["module"], origin["op"]) == (where.phase, where.module, where.op)
    assert path["step"] == where.step
    assert origin["nan" if where.nonfinite == "nan" else "inf"] > 0
    harms = nodes_of(path, "affected")
    assert path["nodes"][-1] is harms[-1]
    assert {node["op"] for node in harms} <= set(path["affected"])
    assert harms[0]["op"].startswith(target)
    assert [node["role"] for node in path["nodes"]] == sorted(
        (node["role"] for node in path["nodes"]), key=["before", "origin", "carrier", "affected"].index
    )
    assert all(node["nan"] == node["inf"] == 0 for node in nodes_of(path, "before"))
    assert all(node["nan"] + node["inf"] > 0 for node in path["nodes"] if node["role"] != "before")
    orders = [node["order"] for node in path["nodes"]]
    assert orders == sorted(orders)


@pytest.mark.xdist_group("rmsnorm_silent_zero")
def test_an_overflow_that_leaves_only_finite_values_behind_has_a_way_but_no_sink(check_report):
    report = diagnosed("rmsnorm_silent_zero")
    path = check_report(render_json(report))["path"]
    assert path["fingerprint"] == report.findings[0].fingerprint
    (origin,) = nodes_of(path, "origin")
    where = report.findings[0].where
    assert (origin["module"], origin["op"], origin["inf"] > 0) == (where.module, where.op, True)
    assert path["affected"] == nodes_of(path, "affected") == []
    assert nodes_of(path, "carrier")[0]["module"] == where.module


@pytest.mark.parametrize("case", [of_case("healthy_gpt_neg_inf_mask"), of_case("bf16_adamw_stagnation", slow=True)])
def test_where_nothing_non_finite_is_born_there_is_no_path(case, check_report):
    assert check_report(render_json(diagnosed(case)))["path"] is None


# -- the section itself ------------------------------------------------------------------------------------------------


def passage(order, op="aten.add", **known):
    return PathOp(order=order, where=Where(step=3, phase="forward", module=f"m{order}", op=op), **known)


def born(**known):
    where = Where(step=3, phase="backward", module="fc", op="aten.sqrt", forward_source=Source("net.py", 7))
    return NonFiniteOrigin(
        order=10, where=where, came_from="op", kernel="aten.sqrt", affected=("loss", "grad:fc.weight"), **known
    )


def test_a_long_path_keeps_both_of_its_ends_and_counts_the_rest():
    carriers = tuple(passage(order) for order in range(11, 11 + MOST_CARRIERS + 7))
    path = to_plain(path_section(born(way=PropagationPath(carriers=carriers, omitted=5)), "f" * 16, {}))
    shown = [node["order"] for node in nodes_of(path, "carrier")]
    assert len(shown) == MOST_CARRIERS
    assert (shown[0], shown[-1]) == (11, carriers[-1].order)
    assert path["omitted"] == 5 + 7
