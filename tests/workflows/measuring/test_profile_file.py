from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from ampdoctor.errors import OutputError, UsageError
from ampdoctor.ranges.profile_file import pack, unpack
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.profile import MAX_PROFILE_BYTES, profile, profile_from_file, read_profile, write_profile
from ampdoctor.workflows.requests import ReplayRequest

RUNS = str(Path(__file__).parent / "ranges_runs.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "run.ampprofile"
    request = ReplayRequest(factory=f"{RUNS}:tied", arguments={"steps": 3}, device="cpu")
    return str(path), profile(request, save=str(path))


@pytest.fixture
def ranges(written):
    return read_profile(written[0])


def test_what_is_read_is_what_was_measured(written, ranges):
    arrays, facts = pack(ranges)
    again_arrays, again = pack(unpack(arrays, json.loads(json.dumps(facts))))
    assert again == facts
    assert arrays.keys() == again_arrays.keys()
    for name, array in arrays.items():
        assert array.dtype == again_arrays[name].dtype, name
        np.testing.assert_array_equal(array, again_arrays[name])
    assert ranges.steps == 3
    assert ranges.modules
    assert ranges.updates
    assert ranges.shadows


def test_the_view_of_a_file_is_the_report_of_the_run(written, check_report):
    path, report = written
    view = profile_from_file(path)
    assert view.profile == report.profile
    assert view.findings == report.findings
    assert view.checks == report.checks
    check_report(render_json(view))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        (b"", "is no profile"),
        (b'{"schema_version": "2"}', "is a report, not a profile"),
        (save({"w": np.ones(3)}), "without a profile"),
    ],
    ids=["missing", "empty", "report", "safetensors"],
)
def test_what_is_no_profile_is_refused(content, sentence, tmp_path):
    path = tmp_path / "p.ampprofile"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_profile(str(path))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [(os.mkfifo, "is not a regular file"), (lambda path: path.symlink_to("nowhere"), "is a link to nothing")],
    ids=["fifo", "dangling"],
)
def test_what_is_no_regular_file_is_refused_without_reading(make, sentence, tmp_path):
    path = tmp_path / "p.ampprofile"
    make(path)
    with pytest.raises(UsageError) as caught:
        read_profile(str(path))
    assert sentence in str(caught.value)


def test_a_file_is_not_read_beyond_its_limit(tmp_path):
    path = tmp_path / "p.ampprofile"
    with path.open("wb") as sparse:
        sparse.truncate(MAX_PROFILE_BYTES + 1)
    with pytest.raises(UsageError, match="is larger than any profile"):
        read_profile(str(path))


@pytest.mark.parametrize("kept", [0.05, 0.999])
def test_a_truncated_profile_is_refused(kept, written, tmp_path):
    data = Path(written[0]).read_bytes()
    path = tmp_path / "cut.ampprofile"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(UsageError):
        read_profile(str(path))


def test_every_changed_byte_is_noticed(written, tmp_path):
    data = Path(written[0]).read_bytes()
    path = tmp_path / "changed.ampprofile"
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for place in (*range(0, header, 1997), *range(header, len(data), 2999)):
        changed = bytearray(data)
        changed[place] ^= 0x41
        path.write_bytes(bytes(changed))
        with pytest.raises(UsageError):
            read_profile(str(path))


def say(*path, value):
    def change(arrays, facts):
        here = facts
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (say("version", value=1), "version 1; this ampdoctor reads version 2"),
        (say("exponents", value=[0, 1]), "other scales"),
        (say("sites", 0, "kind", value="other"), "sites[0].kind is 'other', not one of"),
        (say("updates", 0, value={}), "updates[0].elements is missing"),
        (say("modules", value=None), "modules is not of type array"),
        (lambda arrays, _facts: arrays.pop("fp8"), "fp8 is missing"),
        (lambda arrays, _facts: arrays.update(fp8=arrays["fp8"].astype(np.float32)), "another shape or dtype"),
        (lambda arrays, _facts: arrays.update(square_sums=arrays["square_sums"][1:]), "another shape or dtype"),
    ],
)
def test_a_profile_of_another_form_is_refused(change, sentence, ranges):
    arrays, facts = pack(ranges)
    change(arrays, facts)
    with pytest.raises(UsageError) as caught:
        unpack(arrays, facts)
    assert sentence in str(caught.value)


def test_what_was_there_stays_where_the_file_cannot_be_written(ranges, tmp_path):
    folder = tmp_path / "no"
    with pytest.raises(OutputError):
        write_profile(str(folder / "p.ampprofile"), ranges)
    assert not folder.exists()


@pytest.mark.slow
def test_from_the_command_line(run_here, check_report, tmp_path):
    first, again = (tmp_path / f"{name}.ampprofile" for name in "ab")
    factory = f"{RUNS}:tied"
    assert run_here("profile", factory, "--save", str(first)).returncode == 0
    view = run_here("profile", str(first), "--save", str(again), "--format", "json")
    report = check_report(view.stdout)
    assert report["profile"]["steps"] == 4
    assert report["target"]["factory"] == factory
    assert report["run"]["saved"] == str(again)
    assert pack(read_profile(str(again)))[1] == pack(read_profile(str(first)))[1]


def test_profiles_do_not_add_up(run_here):
    refused = run_here("recommend", "a.ampprofile", "b.ampprofile")
    assert refused.returncode == 2
    assert "b.ampprofile is one target too many: give one factory, or one profile" in refused.stderr


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        ("profile", ["--checkpoint", "nothere.pt"], "--checkpoint:"),
        ("recommend", ["--policy", "native", "--device", "cpu"], "--policy, --device:"),
        ("profile", ["--arg", "steps=3", "--batches", "a:b", "--loss", "a:c"], "--arg, --batches, --loss:"),
        ("recommend", ["--expect-failure"], "--expect-failure:"),
    ],
    ids=str,
)
def test_options_of_a_replay_are_refused_where_nothing_runs(command, options, named, written, run_here):
    refused = run_here(command, written[0], *options)
    assert refused.returncode == 2
    assert f"{named} only for a replay" in refused.stderr
