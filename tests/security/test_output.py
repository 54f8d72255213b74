"""Reports that carry names from a hostile file: S18, S19, S22."""

from __future__ import annotations

import math
import re
import struct

import pytest
import torch

from tests.security import hostile as h

NAN = struct.pack("<2f", math.nan, math.inf)

# S18: each does something to a terminal, to a line, to Rich's markup, or to a reader of logs (S19: `::error::`)
NAMES = {
    "clear": "layer\x1b[2J\x1b[H.weight",
    "title": "layer\x1b]0;owned\x07.weight",
    "link": "layer\x1b]8;;http://evil.invalid\x1b\\here\x1b]8;;\x1b\\",
    "c1": "layer\x9b31m.weight",
    "bidi": "layer\u202egnp.weight\u2066",
    "line": "layer\nverdict: healthy\r\n.weight",
    "separators": "layer\u2028verdict\u2029\x85\x0b\x0c",
    "backspace": "layer\x08\x08\x08\x7f.weight",
    "markup": "layer[/] [bold red][link=http://evil.invalid]x[/link].weight",
    "broken markup": "[/nothing] ] [ [[",
    "workflow": "::error file=a,line=1::x%0A",
    "html": "<script>alert(1)</script>`code`|cell|",
    "zero width": "lay\u200ber\ufeff.weight\u00ad",
    "tags": "layer\U000e0041\U000e0042.weight",
    "percent": "%s%n{0}{name}$(touch x)",
    "empty": "",
}
SURROGATE = "layer\ud800.weight"


def sick(path, name):
    if any(0xD800 <= ord(c) < 0xE000 for c in name):
        pair = h.tensor(h.storage("1", 2), h.sizes(2), h.sizes(1))
        path.write_bytes(h.torch_zip(h.whole(h.table({name: pair, "w": h.ONES})), {"data/1": NAN}))
        return
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    path.write_bytes(h.safetensors(header, NAN))


def harmless(shown):
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]", shown
    )
    assert not any(0xD800 <= ord(c) < 0xE000 for c in shown)


@pytest.mark.parametrize("name", [*NAMES.values(), SURROGATE], ids=[*NAMES, "surrogate"])
def test_a_name_cannot_act_on_a_terminal_or_forge_a_line(name, tmp_path, run_in_process, check_report):
    sick(tmp_path / "m.bin", name)
    code, shown, _ = run_in_process("scan", str(tmp_path / "m.bin"))
    assert code == 1
    harmless(shown)
    assert not any(line.startswith(("verdict: healthy", "::")) for line in shown.splitlines())
    code, shown, _ = run_in_process("scan", str(tmp_path / "m.bin"), "--format", "json")
    assert code == 1
    assert shown.isascii()
    findings = check_report(shown)["findings"]
    assert name in {finding["where"]["tensor"] for finding in findings}


@pytest.mark.parametrize("name", [NAMES[kind] for kind in ("clear", "line", "bidi", "markup", "workflow")])
def test_nor_can_the_name_of_a_file_or_of_a_class(name, tmp_path, run_in_process):
    file = re.sub("[/\0]", "", name) or "x"
    (tmp_path / f"{file}.pt").write_bytes(h.model_and(h.call(h.text("m") + h.text(name) + b"\x93")))
    (tmp_path / f"{file}2.pt").write_bytes(h.legacy(h.ONES, h.EMPTY_LIST))
    for target in (tmp_path, tmp_path / f"{file}.pt", tmp_path / f"{file}2.pt"):
        for form in ("human", "json"):
            code, shown, said = run_in_process("scan", str(target), "--format", form)
            assert code in {0, 2}
            harmless(shown)
            harmless(said)


CONTENTS = {
    "healthy": (0, h.saved({"w": torch.ones(3)})),
    "sick": (1, h.saved({"w": torch.tensor([math.nan, math.inf, 1.0])})),
    "scaler": (1, h.saved({"model": {"w": torch.ones(3)}, "scaler": {"scale": math.inf, "growth_factor": math.nan,
                                                         "backoff_factor": -math.inf, "growth_interval": 10**300,
                                                         "_growth_tracker": 0}})),
    "loss": (None, h.saved({"model": {"w": torch.ones(3)}, "loss": math.nan, "step": 10**400})),
    "corrupted": (2, h.saved({"w": torch.ones(3)})[:-30]),
    "empty": (2, b""),
    "refused": (2, h.model_and(b"\x82\x01")),
    "too much": (2, h.model_and(b")" + b"2\x86" * 60)),
    "nothing": (2, h.saved({"epoch": 3})),
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
def test_every_report_is_strict_json_the_same_twice_and_its_code_that_of_any_format(
    content, tmp_path, run_in_process, check_report
):
    """S22."""
    expected, data = CONTENTS[content]
    (tmp_path / "c.pt").write_bytes(data)
    code, shown, said = run_in_process("scan", str(tmp_path / "c.pt"), "--format", "json")
    assert (code, shown, said) == run_in_process("scan", str(tmp_path / "c.pt"), "--format", "json")
    human = run_in_process("scan", str(tmp_path / "c.pt"), "--format", "human")
    assert human == run_in_process("scan", str(tmp_path / "c.pt"), "--format", "human")
    assert human[0] == code == (code if expected is None else expected)
    report = check_report(shown)
    assert report["complete"] == (code != 2)
    if code == 2:
        assert human[1] == ""
        assert said.startswith("ampdoctor: error: ")
        assert len(said.splitlines()) == 1
