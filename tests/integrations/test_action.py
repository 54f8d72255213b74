"""The GitHub Action: action.yml against the command line's help, and its step run as a runner runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
INPUTS = ACTION["inputs"]
COMMANDS = ("scan", "health", "bisect-nan", "profile", "recommend", "plan", "merge")
OWN = {"command", "target", "args", "install", "working-directory"}
"""Inputs of the action that are no flags."""
LEFT_TO_ARGS = {
    *("help", "output", "verbose", "color", "no-progress", "show-config", "list"),
    *("compare-steps", "no-compare", "spill", "fresh-scaler"),
    *("until-sick", "max-steps", "skip-batches", "model"),
    *("follow", "reduction", "tp", "pp", "cp", "to-tp", "to-pp", "to-cp", "device-memory"),
    *("memory-per-sample", "peak-memory", "params", "shard-stage", "state-bytes", "profile"),
    *("target", "precision-matters", "reduce-fp16", "accumulation"),
}
"""Flags without an input: for a terminal, of little use in CI, or rare; `args` takes them."""


@pytest.fixture(scope="module")
def script():
    """The step's script, as a module."""
    spec = spec_from_file_location("action_run", ROOT / ".github" / "action" / "run.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step(tmp_path, python):
    """Return a function that runs the step as GitHub does; gives the process, the outputs and the summary.

    Its attribute `python` is the Python on the path.
    """
    place = tmp_path / "workspace"
    place.mkdir()
    healthy, sick = torch.ones(2, 2), torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    save_file({"fc.weight": healthy}, place / "healthy.safetensors")
    save_file({"fc.weight": sick}, place / "sick.safetensors")
    save_file({"fc.weight": sick}, place / 'it\'s "$(touch pwned)" `x`; %0A.safetensors')
    (place / "cut.safetensors").write_bytes(b"cut off")
    shell = ACTION["runs"]["steps"][-1]

    def run(**given):
        files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("", encoding="utf-8")
        asked = {name.replace("_", "-"): value for name, value in given.items()}
        assert asked.keys() <= INPUTS.keys()
        known = {name: entry.get("default", "") for name, entry in INPUTS.items()} | asked
        env = {
            **os.environ,
            **{name: str(file) for name, file in files.items()},
            "PATH": os.pathsep.join(
                [str(Path(run.python).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": str(ROOT),
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_WORKSPACE": str(place),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_ACTIONS": "true",
            "AMPDOCTOR_INPUTS": json.dumps(known, indent=2),
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", shell["run"]]
        folder = place / known["working-directory"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)
        said = files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines()
        outputs = dict(line.split("=", 1) for line in said)
        assert outputs.keys() == ACTION["outputs"].keys()
        return done, outputs, files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")

    run.place, run.python = place, python
    return run


def test_a_sick_checkpoint_fails_the_step_with_annotation_summary_and_outputs(step, check_report):
    done, outputs, summary = step(target="sick.safetensors")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("::error")
    assert (outputs["exit-code"], outputs["verdict"]) == ("1", "sick")
    report = check_report(Path(outputs["report"]).read_text(encoding="utf-8"))
    assert [finding["code"] for finding in report["findings"]] == ["AMP101"]
    assert json.loads(Path(outputs["sarif"]).read_text(encoding="utf-8"))["version"] == "2.1.0"
    assert "AMP101" in summary


def test_in_another_working_directory_findings_are_of_files_from_the_root(step):
    for folder in (".git", "training"):
        (step.place / folder).mkdir()
    (step.place / "sick.safetensors").rename(step.place / "training" / "sick.safetensors")
    done, outputs, _ = step(target="sick.safetensors", working_directory="training")
    assert done.stdout.startswith("::error file=training/sick.safetensors,"), done.stderr
    assert '"uri": "training/sick.safetensors"' in Path(outputs["sarif"]).read_text(encoding="utf-8")


def test_healthy_checkpoints_pass_the_step(step):
    done, outputs, _ = step(target="healthy.safetensors\n\n./healthy.safetensors\r\n\r\n")
    assert done.returncode == 0, done.stderr
    assert (outputs["exit-code"], outputs["verdict"]) == ("0", "healthy")


@pytest.mark.parametrize("target", ["cut.safetensors", ""])
def test_what_cannot_be_read_fails_the_step(step, target):
    done, outputs, _ = step(target=target)
    assert done.returncode == 2
    assert (outputs["exit-code"], outputs["verdict"]) == ("2", "inconclusive" if target else "")
    assert bool(outputs["report"]) == bool(outputs["sarif"]) == bool(target)  # no target: no command either
    assert "ampdoctor: error" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_replay_takes_its_own_inputs(step):
    (step.place / "run.py").write_text(
        "import torch\nfrom ampdoctor import TrainingRun\n\n"
        "def make_run(size, name):\n"
        "    assert name == 'a b'\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    return TrainingRun(model=model, batches=[torch.ones(1, 2)] * size, precision='bf16',\n"
        "                       loss=lambda model, x: model(x).sum(),\n"
        "                       optimizer=torch.optim.SGD(model.parameters(), 0.1))\n",
        encoding="utf-8",
    )
    done, outputs, _ = step(command="bisect-nan", target="run.py:make_run", arg='size=3\nname="a b"', steps="2")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path(outputs["report"]).read_text(encoding="utf-8"))["run"]["steps"] == 2


def test_a_log_is_judged_and_its_numbers_go_where_they_are_asked_to(step):
    sick = "".join(f"step {at}: loss {'nan' if at > 50 else 2.0}, grad_norm 1.0\n" for at in range(60))
    (step.place / "job.out").write_text(sick, encoding="utf-8")
    done, outputs, summary = step(command="health", target="job.out", export="csv=numbers\nopenmetrics=run.prom")
    assert (done.returncode, outputs["verdict"]) == (1, "sick"), done.stderr
    assert done.stdout.startswith("::error")
    assert "AMP722" in summary
    assert (step.place / "numbers" / "steps.csv").is_file()
    assert (step.place / "run.prom").is_file()


HOSTILE = [
    *("$(touch pwned)", "`touch pwned`", "'; touch pwned #", '" && touch pwned && "', "--output=pwned", "${{ 1 }}"),
    *("::set-output name=verdict::healthy", "-h", "a; b"),
]


def test_what_an_input_says_is_never_run(step):
    done, outputs, _ = step(target="\n".join([*HOSTILE, "verdict=healthy"]))
    assert done.returncode == 2
    assert outputs["exit-code"] == "2"
    assert outputs["verdict"] in ("", "inconclusive")
    assert not (step.place / "pwned").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_an_input_says_is_one_argument(script, hostile, tmp_path):
    for name in script.VALUES:
        given = script.arguments({"command": "scan", "target": "x", name: hostile}, tmp_path)
        assert f"--{name}={hostile}" in given
    for name in script.LISTS:
        given = script.arguments({"command": "scan", "target": "x", name: f"{hostile}\nb"}, tmp_path)
        assert {f"--{name}={hostile}", f"--{name}=b"} <= set(given)
    given = script.arguments({"command": "scan", "target": hostile}, tmp_path)
    assert given[given.index("--") :] == ["--", hostile]
    with pytest.raises(script.WrongInputError):
        script.arguments({"command": hostile, "target": "x"}, tmp_path)
    with pytest.raises(script.WrongInputError):
        script.arguments({"command": "scan", "target": "x", "all": hostile}, tmp_path)


def test_a_hostile_name_is_a_name(step):
    name = next(path.name for path in step.place.iterdir() if path.name.startswith("it's"))
    done, outputs, _ = step(target=name)
    assert done.returncode == 1, done.stderr
    assert outputs["verdict"] == "sick"
    assert not (step.place / "pwned").exists()


ODD_NAMES = [f"a{c}b" for c in "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\xa0\t\r "]
ODD_NAMES += [" a", "a ", "a\u2028", "a\x0c", "a\t", "a\r\u2028", " "]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_never_taken_for_another_ones(script, name, tmp_path):
    given = script.arguments({"command": "scan", "target": f"{name}\nz\r\n{name}\r\n"}, tmp_path)
    assert given[given.index("--") :] == ["--", name, "z", name]
    for key in script.LISTS:
        given = script.arguments({"command": "scan", "target": "x", key: f"{name}\nz"}, tmp_path)
        assert [entry for entry in given if entry.startswith(f"--{key}=")][:2] == [f"--{key}={name}", f"--{key}=z"]
    for key in script.VALUES:
        for end in ("", "\n"):
            given = script.arguments({"command": "scan", "target": "x", key: f"{name}{end}"}, tmp_path)
            assert f"--{key}={name}" in given


def test_a_name_that_ends_as_a_line_may_end_is_refused(step):
    (step.place / "healthy.safetensors\r").write_bytes((step.place / "sick.safetensors").read_bytes())
    done, outputs, _ = step(target="healthy.safetensors\r\n")
    assert (done.returncode, outputs["verdict"]) == (2, "")
    assert "cannot be told from the end of a line" in done.stderr


def test_a_folder_of_the_same_name_in_the_workspace_is_not_what_runs(step):
    step.python = sys.executable  # a fork has both imported already
    (step.place / "ampdoctor.py").write_text("raise SystemExit(0)", encoding="utf-8")
    (step.place / "json.py").write_text("raise SystemExit(0)", encoding="utf-8")
    assert step(target="sick.safetensors")[0].returncode == 1


def test_a_switch_is_true_or_false(step):
    assert step(target="sick.safetensors", exit_zero="yes")[0].returncode == 2
    done, _, _ = step(target="sick.safetensors", exit_zero="True ", report="junit=out.xml\nmarkdown=out.md")
    assert done.returncode == 0
    assert (step.place / "out.xml").is_file()
    assert (step.place / "out.md").is_file()


def test_each_flag_has_its_input_or_is_left_to_args(run_cli):
    shown = "".join(run_cli(command, "--help").stdout for command in COMMANDS)
    flags = set(re.findall(r"^ +(?:-\w, )?--([a-z][a-z0-9-]*)", shown, re.MULTILINE))
    inputs = set(INPUTS) - OWN
    assert inputs <= flags
    assert flags - inputs == LEFT_TO_ARGS & flags
    assert flags >= LEFT_TO_ARGS


def test_no_input_is_written_into_a_script():
    assert ACTION["runs"]["using"] == "composite"
    for part in ACTION["runs"]["steps"]:
        assert "${{" not in part["run"]
        assert part["shell"] == "bash"
