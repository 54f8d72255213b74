"""The emulation against what real GPUs said (`make gpu-check`), and the check itself, which runs without one."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from ampdoctor.evidence.location import Where
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import golden, histograms, ops, products
from fixtures.corpus import runs
from tests.corpus.judging import wrong_in

CPU = torch.device("cpu")
FACTS = ("step", "phase", "module", "op", "nonfinite")

# old ops say that they are old, and libraries of the corpus speak up while their models are built
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def broken_by(found):
    """What no longer holds of a golden file: a sentence each."""
    sections = found.sections
    rows = sections.get("ops", {})
    yield from ops.differences(rows, ops.emulated(rows))
    for case, row in sections.get("cases", {}).items():
        label = runs.label(case)
        if label["kind"] == "healthy":
            wrong = [] if row.get("verdict") == "healthy" else ["verdict"]
        elif "cause" in row:
            wrong = wrong_in(label, row["cause"], Where(**{name: row[name] for name in FACTS}), "cuda")
        else:
            wrong = ["missed"]
        yield from (f"{case}: {name}" for name in wrong)
    host = histograms.samples()
    for name, row in sections.get("histograms", {}).items():
        if name in host:
            yield from histograms.differing(name, row, histograms.on_the_host(*host[name]))
    yield from products.differences(sections.get("products", {}))
    for what, waits in sections.get("syncs", {}).items():
        yield from (f"{what} waits: {one}" for one in waits)


@pytest.mark.parametrize("path", golden.files() or [None], ids=lambda path: path.stem if path else "none")
def test_the_emulation_holds_to_what_a_gpu_said(path):
    if path is None:
        pytest.skip("no golden file")
    found = golden.read(path)
    assert path.name == found.file_name
    assert list(broken_by(found)) == []


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The golden file of a run without a GPU: CUDA's own cast kernels, the device's own counting, the CPU's replays."""
    folder = tmp_path_factory.mktemp("golden")
    assert gpu_check.main(["--device", "cpu", "--quick", "--out", str(folder)]) == 0
    return folder / f"cpu-{torch.__version__.partition('+')[0]}.json"


@pytest.mark.slow
def test_a_rehearsal_asks_everything_and_its_file_holds(rehearsed):
    found = golden.read(rehearsed)
    assert set(found.sections) == set(gpu_check.PARTS)
    assert len(found.sections["ops"]) > 100
    assert {row["dtypes"]["float16 and float16 under float16"] for row in found.sections["ops"].values()} == {
        "float16",
        "float32",
        "raises",
    }
    assert set(found.sections["cases"]) == set(gpu_check.FEW)
    assert list(broken_by(found)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (("ops", "exp", "dtypes", {"float32 and float32 under float16": "float16"}), "exp of float32 and float32"),
        (("cases", "box_coder_log_eps", "cause", "forward_overflow"), "box_coder_log_eps: cause"),
        (("cases", "clip_before_unscale", "phase", "backward"), "clip_before_unscale: phase"),
        (("cases", "healthy_dead_relu_zero_grads", "verdict", "sick"), "healthy_dead_relu_zero_grads: verdict"),
        (("histograms", "float16, every pattern", "histogram", "0" * 16), "float16, every pattern: histogram"),
    ],
)
def test_a_planted_answer_is_caught(planted, said, rehearsed):
    part, name, fact, wrong = planted
    read = golden.read(rehearsed)
    rows = copy.deepcopy(read.sections[part])
    rows[name][fact] = wrong
    found = golden.Golden(device=read.device, torch=read.torch, sections={part: rows})
    (sentence,) = broken_by(found)
    assert sentence.startswith(said)


def test_a_disagreement_ends_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(ops, "autocast_policy", lambda _name: nullcontext())  # the CPU's own casts
    monkeypatch.setattr(gpu_check, "PARTS", {"ops": (None, lambda device: ops.measure(device, ["exp"]))})
    assert gpu_check.main(["--device", "cpu", "--quick"]) == 1
    said = capsys.readouterr().out
    assert "differs: exp of float16 and float16 under float16: float32 on the device, float16 emulated" in said
    assert "written" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_one_sentence(capsys):
    assert gpu_check.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gpu-check: torch {torch.__version__} finds no CUDA device here")
    assert said.count("\n") == 1
