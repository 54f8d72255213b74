"""msprobe: `PrecisionDebugger` dumps statistics of every module and API, then `overflow_check` reads each step's dump.

Read as an answer: the first anomaly node of the first step that has one. Its op is the API, or the module's class where
the node is a module; its module the innermost one of `construct_info`.
"""

from __future__ import annotations

import importlib
import json
import re

from benchmarks.peers.answer import Answer, Case

_CONFIG = {
    "task": "statistics",
    "rank": [],
    "step": [],
    "level": "mix",
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
}
_NODE = re.compile(r"^Module\.(?:(?P<name>.*)\.)?(?P<kind>\w+)\.(?:forward|backward)\.\d+$")


def overflow_check(case: Case) -> Answer | None:
    """Train with the debugger, then check each step."""
    dump = case.folder / "dump"
    config = case.folder / "config.json"
    config.write_text(json.dumps({**_CONFIG, "dump_path": str(dump)}), encoding="utf-8")
    debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger(config_path=str(config))
    loop = case.loop()
    for _, batch in loop.batches():
        debugger.start(model=loop.model)
        loop.step(batch)
        debugger.stop()
        debugger.step()
    check = importlib.import_module("msprobe.overflow_check.analyzer").OverFlowCheck
    for step in range(len(list(dump.glob("step*")))):
        written = case.folder / f"found{step}"
        check(str(dump / f"step{step}"), str(written)).analyze()
        for path in written.glob("*.json"):
            node = json.loads(path.read_text(encoding="utf-8"))["rank_0"][0]
            module, op = read_node(node["op_name"], node["construct_info"])
            return Answer(step=step, module=module, op=op, said=node["op_name"])
    return None


def read_node(name: str, construct: list[str]) -> tuple[str, str]:
    """Return (module, op) of a node: "Functional.linear.0.forward" inside "Module.fc.Linear.forward.0"."""
    modules = [found for found in map(_NODE.match, construct) if found]
    module = (modules[-1]["name"] or "") if modules else ""
    own = _NODE.match(name)
    return module, own["kind"] if own else name.split(".")[1]
