from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from ampdoctor.errors import OutputError, UsageError
from ampdoctor.ranges.profile import merge
from ampdoctor.ranges.profile_file import pack, unpack
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.profile import MAX_PROFILE_BYTES, profile, profile_from_files, read_profile, write_profile
from ampdoctor.workflows.requests import ReplayRequest

RUNS = str(Path(__file__).parent / "ranges_runs.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "run.ampprofile"
    request = ReplayRequest(factory=f"{RUNS}:tied", arguments={"steps": 3}, device="cpu")
    return str(path), profile(request, save=str(path))


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    """The same run with other batches."""
    path = tmp_path_factory.mktemp("later") / "later.ampprofile"
    profile(ReplayRequest(factory=f"{RUNS}:tied", arguments={"steps": 3, "seed": 6}, device="cpu"), save=str(path))
    return str(path)


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
    view = profile_from_files([path])
    assert view.profile == report.profile
    assert view.findings == report.findings
    assert view.checks == report.checks
    check_report(render_json(view))


def test_two_profiles_of_one_run_add_up(written, later, ranges, tmp_path):
    path, _ = written
    second = read_profile(later)
    both = merge(ranges, second)
    assert both.steps == 6
    for site, one, two, sum_ in zip(ranges.sites, ranges.histograms, second.histograms, both.histograms, strict=True):
        assert sum_ == (two if site.kind == "weight" else one + two)
    np.testing.assert_array_equal(both.series.error[3:], second.series.error)
    assert [shadow.steps for shadow in both.shadows[len(ranges.shadows) :]] == [
        tuple(step + 3 for step in shadow.steps) for shadow in second.shadows
    ]
    out = tmp_path / "both.ampprofile"
    view = profile_from_files([path, later], save=str(out))
    assert view.profile["steps"] == read_profile(str(out)).steps == 6
    assert view.run["saved"] == str(out)


def test_the_same_steps_are_not_counted_twice(written, later, ranges):
    both = merge(ranges, read_profile(later))
    for first, second in ((ranges, ranges), (both, ranges), (ranges, both), (both, read_profile(later))):
        with pytest.raises(UsageError, match="the same steps twice"):
            merge(first, second)
    with pytest.raises(UsageError, match="the same steps twice"):
        profile_from_files([written[0], later, written[0]])


def test_profiles_of_different_runs_are_not_added(ranges):
    with pytest.raises(UsageError, match="not of one run: their precisions"):
        merge(ranges, replace(ranges, run=replace(ranges.run, precision="bf16")))
    other = replace(ranges.sites[0], weight=7)
    with pytest.raises(UsageError, match="not of one run: their modules"):
        merge(ranges, replace(ranges, sites=(other, *ranges.sites[1:])))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        (b"", "is no profile"),
        (b"not a profile", "is no profile"),
        (b'{"schema_version": "1"}', "is a report, not a profile"),
        (save({"w": np.ones(3)}), "without a profile"),
    ],
    ids=["missing", "empty", "text", "report", "safetensors"],
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
    [
        (os.mkfifo, "is a FIFO, not a regular file"),
        (Path.mkdir, "is a folder, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a character device, not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
    ],
    ids=["fifo", "folder", "device", "dangling"],
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


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.3, 0.7, 0.999])
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
    for place in (*range(0, header, 997), *range(header, len(data), 1499)):
        changed = bytearray(data)
        changed[place] ^= 0x41
        path.write_bytes(bytes(changed))
        with pytest.raises(UsageError):
            read_profile(str(path))


def forged(ranges, change):
    """A file with a right checksum over a wrong content: `unpack` is what meets it."""
    arrays, facts = pack(ranges)
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(arrays, facts)
    with pytest.raises(UsageError) as caught:
        unpack(arrays, facts)
    return str(caught.value)


def put(name, index, value):
    def change(arrays, facts):
        arrays[name][index] = value

    return change


def everywhere(name, *place, value):
    return put(name, (..., *place), value)


def times(name, factor):
    def change(arrays, facts):
        arrays[name] *= factor

    return change


def one_more(name):
    def change(arrays, facts):
        arrays[name][0] += 1

    return change


def infinite_activation(arrays, facts):
    index = next(i for i, site in enumerate(facts["sites"]) if site["kind"] == "activation")
    arrays["series.amax"][0, index] = np.inf


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
        (say("sites", value=None), "lacks its sites"),
        (say("sites", 0, value=3), "site 0 is no object"),
        (say("sites", 0, "kind", value="other"), "no name, kind or part"),
        (say("sites", 0, "weight", value=10**400), "not a count"),
        (say("run", "precision", value="x"), "none of fp32"),
        (say("run", "precision", value=None), "none of fp32"),
        (say("run", "loss_scale", value=0), "not a positive number"),
        (say("run", "base_scale", value=1e308), "not a positive number"),
        (say("run", "loss_scale", value=10**400), "not a number that a float can hold"),
        (say("run", "loss_scale", value=10**3000), "0000..., not a number"),
        (say("run", "scaler", value=3), "no mapping"),
        (say("run", "scaler", value={"scale": "x"}), "scale is 'x', not a number"),
        (say("run", "scaler", value={"growth_interval": "Infinity"}), "is 'Infinity', not a number"),
        (say("run", "scaler", value={"_growth_tracker": True}), "is True, not a number"),
        (say("nonfinite_steps", value=None), "lacks its nonfinite_steps"),
        (say("nonfinite_steps", value=["1"]), "no list of steps"),
        (say("nonfinite_steps", value=[10**12]), "no list of steps"),
        (say("modules", 0, "ops", value=3), "an entry of ModuleFacts"),
        (say("modules", 0, "name", value=10**400), "an entry of ModuleFacts"),
        (say("modules", 0, "product_amax", value=10**400), "an entry of ModuleFacts"),
        (say("updates", 0, "stagnant", value="x"), "an entry of UpdateFacts"),
        (say("updates", 0, value={}), "an entry of UpdateFacts"),
        (say("shadows", 0, "scale", value=-1.0), "not a positive number"),
        (say("shadows", 0, "relative_error", value=-1.0), "not a magnitude"),
        (say("shadows", 0, "steps", value=[99]), "no list of steps"),
        (put("series.amax", 0, -1.0), "negative"),
        (put("series.amax", 0, np.nan), "not finite"),
        (put("series.nonzero", 0, -1), "negative"),
        (put("series.flushed", 0, 2.0), "above 1"),
        (put("series.error", 0, np.inf), "not finite"),
        (put("fp8", 0, -1.0), "negative"),
        (put("histogram.counts", 0, 0), "no tensor has"),
        (put("histogram.counts", 0, 2**60), "no tensor has"),
        (put("histogram.bins", 0, -1), "no tensor has"),
        (put("histogram.bins", 0, 2047), "no tensor has"),
        (put("histogram.ends", 0, 10**9), "no tensor has"),
        (put("histogram.special", 0, -1), "negative counts"),
        (put("histogram.extremes", 0, np.nan), "negative counts or magnitudes"),
        (put("histogram.extremes", (0, 1), 1e30), "extremes"),
        (lambda arrays, _facts: arrays.pop("fp8"), "lacks fp8"),
        (lambda arrays, _facts: arrays.update(fp8=arrays["fp8"].astype(np.float32)), "another shape or dtype"),
        (lambda arrays, _facts: arrays.update(square_sums=arrays["square_sums"][1:]), "another shape or dtype"),
    ],
)
def test_a_forged_profile_is_refused(change, sentence, ranges):
    assert sentence in forged(ranges, change)


def test_what_was_there_stays_where_the_file_cannot_be_written(ranges, tmp_path):
    folder = tmp_path / "no"
    with pytest.raises(OutputError):
        write_profile(str(folder / "p.ampprofile"), ranges)
    assert not folder.exists()


@pytest.mark.slow
def test_from_the_command_line(run_here, check_report, tmp_path):
    first, second, again = (tmp_path / f"{name}.ampprofile" for name in "abc")
    factory = f"{RUNS}:tied"
    assert run_here("profile", factory, "--save", str(first)).returncode == 0
    assert run_here("profile", factory, "--arg", "seed=6", "--save", str(second)).returncode == 0
    view = run_here("profile", str(first), str(second), "--save", str(again), "--format", "json")
    report = check_report(view.stdout)
    assert report["profile"]["steps"] == 8
    assert report["target"]["factory"] == factory
    head = run_here("profile", str(first), str(second)).stdout.splitlines()
    assert f"(measured from {factory})" in " ".join(head)
    twice = run_here("profile", str(first), str(first))
    assert twice.returncode == 2
    assert "the same steps twice" in twice.stderr
    refused = run_here("profile", factory, str(first))
    assert refused.returncode == 2
    assert "is no saved profile" in refused.stderr
    own = run_here("profile", str(first), "--save", str(first))
    assert own.returncode == 2
    assert "it is what is to be read" in own.stderr
    nowhere = run_here("profile", factory, "--save", str(tmp_path / "no" / "p"))
    assert nowhere.returncode == 2
    assert "does not exist" in nowhere.stderr


@pytest.mark.parametrize("command", ["profile", "recommend"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--checkpoint", "nothere.pt"], "--checkpoint:"),
        (["--steps", "5"], "--steps:"),
        (["--precision", "bf16"], "--precision:"),
        (["--policy", "native", "--device", "cpu"], "--policy, --device:"),
        (["--arg", "steps=3", "--batches", "a:b", "--loss", "a:c"], "--arg, --batches, --loss:"),
        (["--app-dir", "."], "--app-dir:"),
        (["--expect-failure"], "--expect-failure:"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_a_replay_are_refused_where_nothing_runs(command, options, named, written, run_here):
    refused = run_here(command, written[0], *options)
    assert refused.returncode == 2
    assert f"{named} only for a replay" in refused.stderr
