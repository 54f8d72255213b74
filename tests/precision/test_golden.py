"""The emulation against what real GPUs said (`make gpu-check`), and the check itself, which runs without one."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext

import pytest
import torch

from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Where
from ampdoctor.probes.nonfinite import NonFiniteProbe
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import cases, golden, histograms, ops, products, syncs
from benchmarks.gpu_check.section import Section
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


def test_an_op_that_the_emulation_casts_otherwise_is_named_with_both_dtypes(monkeypatch):
    monkeypatch.setattr(ops, "autocast_policy", lambda _name: nullcontext())  # the CPU's own casts
    section = ops.measure(CPU, ("exp", "linear"))
    assert section.differences[0] == "exp of float16 and float16 under float16: float32 on the device, float16 emulated"
    assert all(line.startswith("exp of ") for line in section.differences)  # both devices cast linear alike


def test_an_op_that_another_torch_casts_is_not_compared():
    (row,) = ops.emulated(["rms_norm"]).values()
    other = {"listed": not row["listed"], "dtypes": dict.fromkeys(row["dtypes"], "float16")}
    assert list(ops.differences({"rms_norm": other}, {"rms_norm": row})) == []
    assert list(ops.differences({"rms_norm": {**other, "listed": row["listed"]}}, {"rms_norm": row}))


def test_a_device_that_finds_another_birth_is_named(monkeypatch):
    there = {"verdict": "sick", "cause": "invalid_op", "step": 0}
    answers = {None: there, CPU: {**there, "step": 1}}
    monkeypatch.setattr(cases, "diagnosed", lambda _case, device: answers[device])
    assert cases.measure(CPU, ["a"]).differences == ("a, step: 1 on the device, 0 on the CPU",)


def test_a_device_that_counts_otherwise_is_named(monkeypatch):
    device_counts = histograms.device_counts
    monkeypatch.setattr(histograms, "device_counts", lambda part: device_counts(part.to(torch.bfloat16)))
    named = histograms.measure(CPU, large=False).differences
    assert any(line.startswith("float32, 1800 random: histogram is ") for line in named)
    assert not any(line.startswith("bfloat16") for line in named)


@pytest.mark.parametrize("kind", ["output_grad", "loss"])
def test_a_probe_that_waits_is_found(kind, monkeypatch):
    check = NonFiniteProbe._check

    def waiting(self, seen, name, tensor):
        check(self, seen, name, tensor)
        if seen == kind:
            self._flags[-1].item()

    monkeypatch.setattr(NonFiniteProbe, "_check", waiting)
    found = syncs.measure(CPU, **gpu_check.SMALL)
    assert set(found.rows["a watched step"]) == {"aten::_local_scalar_dense"}
    assert found.rows["a bare step"] == []
    assert found.differences[0].startswith("a watched step waits for the device, ")


@pytest.mark.slow
def test_a_part_alone_leaves_the_others_as_they_were(rehearsed, capsys):
    before = golden.read(rehearsed).sections
    assert gpu_check.main(["--device", "cpu", "--quick", "--part", "syncs", "--out", str(rehearsed.parent)]) == 0
    assert golden.read(rehearsed).sections == before
    assert "ops" not in capsys.readouterr().out


def test_a_disagreement_ends_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(ops, "autocast_policy", lambda _name: nullcontext())  # the CPU's own casts
    monkeypatch.setattr(gpu_check, "PARTS", {"ops": (None, lambda device: ops.measure(device, ["exp"]))})
    assert gpu_check.main(["--device", "cpu", "--quick"]) == 1
    said = capsys.readouterr().out
    assert "differs: exp of float16 and float16 under float16: float32 on the device, float16 emulated" in said
    assert "written" not in said


def test_a_part_that_fails_costs_no_other_and_is_no_disagreement(monkeypatch, tmp_path, capsys):
    def fails(_device):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(
        gpu_check, "PARTS", {"ops": (None, fails), "fine": (None, lambda _device: Section(rows={"a": 1}))}
    )
    assert gpu_check.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "ops: failed" in said.out
    assert "fine: 1 asked, 0 differ" in said.out
    assert "the device is gone" in said.err
    (path,) = golden.files(tmp_path)
    assert golden.read(path).sections == {"fine": {"a": 1}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_one_sentence(capsys):
    assert gpu_check.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gpu-check: torch {torch.__version__} finds no CUDA device here")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_as_a_process(run_cli):
    script = str(golden.FOLDER.parents[1] / "benchmarks" / "gpu_check")
    done = run_cli("--device", "cpu", "--quick", "--part", "syncs", command=(sys.executable, script))
    assert done.returncode == 0, done.stderr
    assert "syncs" in done.stdout


def test_a_file_is_named_after_device_and_torch_and_has_six_digits(tmp_path):
    made = golden.Golden(device="NVIDIA H200", torch="2.13.0+cu130", sections={"overhead": {"fp16": {"median": 1 / 3}}})
    path = golden.write(made, tmp_path)
    assert path.name == "nvidia-h200-2.13.0.json"
    assert golden.read(path).sections == {"overhead": {"fp16": {"median": 0.333333}}}
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_a_file_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(UsageError, match="schema 0, and only 1 is known"):
        golden.read(path)
