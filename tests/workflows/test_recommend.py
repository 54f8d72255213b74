from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ampdoctor.errors import UsageError
from ampdoctor.reports.to_json import render_json
from ampdoctor.workflows.profile import profile
from ampdoctor.workflows.profile_file import MAX_BYTES
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.request import ReplayRequest

ROOT = Path(__file__).parents[2]
CORPUS = str(ROOT / "fixtures" / "corpus" / "runs.py") + ":make_run"
RUNS = str(Path(__file__).parent / "ranges_runs.py")
HEALTHY = sorted(p.stem for p in (ROOT / "fixtures" / "corpus" / "cases").glob("healthy_*.json"))

policies = pytest.mark.parametrize("policy", ["cuda", "native"])


def for_case(case, **options):
    return recommend(ReplayRequest(factory=CORPUS, arguments={"case": case}, device="cpu", **options))


def for_run(name, *, options=None, **arguments):
    return recommend(ReplayRequest(factory=f"{RUNS}:{name}", arguments=arguments, device="cpu", **(options or {})))


def codes(report):
    return [f.code for f in report.findings]


@policies
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_keeps_what_it_has(case, policy, check_report):
    report = for_case(case, policy=policy)
    assert report.verdict == "healthy"
    assert report.complete
    assert not {f.severity for f in report.findings} & {"error", "warning"}
    assert report.scaler["change"] is False
    check_report(render_json(report))


@policies
def test_underflow_without_a_scaler(policy, check_report):
    report = for_case("grad_underflow_no_scaler", policy=policy)
    assert codes(report) == ["AMP301"]
    finding = report.findings[0]
    assert finding.cause == "grad_underflow"
    assert finding.prescription.kind == "scaler"
    assert finding.prescription.verified
    assert report.scaler["change"]
    assert report.scaler["current"] is None
    assert 2.0**14 <= report.scaler["recommended"]["init_scale"] <= 2.0**30
    assert report.scaler["recommended"]["growth_interval"] == 2000
    assert finding.evidence["now"]["activation_grad"] > 0.9
    assert report.scaler["observed"]["flushed"]["activation_grad"] < 1e-2
    assert report.scaler["observed"]["skip_rate"] == report.scaler["predicted"]["skip_rate"] == 0.0
    check_report(render_json(report))


@policies
def test_a_collapsed_scale_is_brought_back(policy, check_report):
    report = for_case("scale_collapsed_then_underflow", policy=policy)
    assert codes(report) == ["AMP301"]
    finding = report.findings[0]
    assert (finding.prescription.kind, finding.prescription.status) == ("init_scale", "verified")
    assert finding.prescription.value == report.scaler["recommended"]["init_scale"]
    assert 2.0**8 <= finding.prescription.value <= 2.0**20
    assert finding.evidence["now"]["weight_grad"] > 0.5
    assert finding.evidence["with_the_change"]["weight_grad"] < 1e-3
    check_report(render_json(report))


@policies
def test_where_no_scale_of_at_least_one_fits_bf16_is_the_advice(policy, check_report):
    report = for_case("no_valid_scale_collapse", policy=policy)
    assert codes(report) == ["AMP406"]
    prescription = report.findings[0].prescription
    assert (prescription.kind, prescription.value, prescription.status) == ("dtype", "bfloat16", "verified")
    assert report.findings[0].cause == "scaler_collapse"
    assert report.scaler["recommended"]["init_scale"] < 1
    check_report(render_json(report))


@policies
def test_a_scale_made_by_hand_is_too_high(policy, check_report):
    report = for_case("static_loss_scale_overflow", policy=policy)
    assert codes(report) == ["AMP405"]
    assert report.scaler["current"] == {"scale": 65536.0, "by_hand": True}
    assert 2.0**8 <= report.scaler["recommended"]["init_scale"] <= 2.0**11
    prescription = report.findings[0].prescription
    assert (prescription.kind, prescription.status) == ("init_scale", "intervention")
    assert prescription.value == report.scaler["recommended"]["init_scale"]
    assert report.scaler["observed"]["relative_error"] < 1e-2
    check_report(render_json(report))


def test_a_scaler_that_finds_its_level_is_left_alone():
    report = for_case("healthy_initial_scale_skips")
    assert report.scaler["change"] is False
    assert report.scaler["current"]["scale"] == report.scaler["recommended"]["init_scale"] == 65536.0
    assert report.scaler["observed"]["skip_rate"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "tf32"])
def test_outside_fp16_no_scaler_is_needed(precision, check_report):
    report = for_run("tied", options={"precision": precision})
    assert report.verdict == "healthy"
    assert report.scaler == {
        "current": None,
        "recommended": None,
        "change": False,
        "bound_by": None,
        "predicted": None,
        "observed": None,
    }
    assert any(c.name == "loss scaling" and "not needed" in c.result for c in report.checks)
    assert any(c.name == "fp16 instead" and "init_scale" in c.result for c in report.checks)
    check_report(render_json(report))


def test_bf16_values_beyond_fp16_say_that_fp16_does_not_fit():
    report = for_case("healthy_bf16_beyond_fp16")
    assert any(c.name == "fp16 instead" and "does not fit" in c.result for c in report.checks)


@policies
@pytest.mark.parametrize("case", ["t5_ffn_wo_overflow", "vae_decoder_conv_overflow"])
def test_a_forward_overflow_is_no_matter_of_scale(case, policy):
    report = for_case(case, policy=policy)
    assert "AMP302" in codes(report)
    finding = next(f for f in report.findings if f.code == "AMP302")
    assert finding.severity == "error"
    assert finding.prescription.verified
    assert finding.prescription.kind == "fp32_modules"
    assert report.scaler["change"] is False
    assert report.scaler["recommended"] is None


def test_what_ranges_do_not_explain_is_sent_on():
    report = for_case("softmax_then_log")
    assert codes(report) == ["AMP207"]
    assert "bisect-nan" in report.findings[0].help
    assert report.scaler["change"] is False


def test_a_dead_scaler_in_a_checkpoint(tmp_path, check_report):
    import importlib.util

    spec = importlib.util.spec_from_file_location("corpus_runs", CORPUS.removesuffix(":make_run"))
    corpus = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(corpus)
    path = tmp_path / "c.pt"
    corpus.write_checkpoint("scaler_state_zero_checkpoint", path)
    report = for_case("scaler_state_zero_checkpoint", checkpoint=str(path))
    assert codes(report) == ["AMP401"]
    assert report.findings[0].prescription.verified
    assert report.scaler["current"]["scale"] == 0.0
    check_report(render_json(report))


def test_predicted_activation_underflow_is_what_is_observed():
    # 2^-12: about a third of the activation gradients of this net flush; the prediction is held to a tenth
    report = for_run("deep", scale=2.0**-12)
    finding = next(f for f in report.findings if f.code == "AMP301")
    check = next(c for c in report.checks if c.name == "activation grad underflow, fp16 against bf16")
    observed = finding.evidence["now"]["activation_grad"]
    assert 0.01 < observed < 0.9
    assert check.headroom["fp16"] == pytest.approx(observed, rel=0.1)


def test_modules_that_no_scale_serves_go_to_fp32(check_report):
    report = for_run("two_worlds")
    finding = next(f for f in report.findings if f.code == "AMP303")
    assert finding.evidence["modules"] == ["quiet"]  # half of the parameters: too many for islands, and none overflows
    assert finding.severity == "warning"
    assert (finding.prescription.kind, finding.prescription.status) == ("dtype", "verified")
    check_report(render_json(report))


def test_a_small_module_that_no_scale_serves_is_an_island():
    report = for_run("two_worlds", wide=64)
    finding = next(f for f in report.findings if f.code == "AMP303")
    assert finding.evidence["modules"] == ["quiet"]
    assert (finding.prescription.kind, finding.prescription.value) == ("fp32_modules", ["quiet"])
    assert finding.prescription.verified


def test_noise_in_a_key_bias_changes_nothing():
    report = for_run("key_bias")
    assert "AMP303" not in codes(report)
    assert report.scaler["change"] is False


def test_two_runs_give_the_same_bytes():
    assert render_json(for_run("tied", scale=2.0**-20)) == render_json(for_run("tied", scale=2.0**-20))


def saved(tmp_path, case, **changes):
    path = tmp_path / "profile.json"
    data = json.loads(render_json(profile(ReplayRequest(factory=CORPUS, arguments={"case": case}, device="cpu"))))
    data.update(changes)
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("grad_underflow_no_scaler", ["AMP301"]),
        ("scale_collapsed_then_underflow", ["AMP301"]),
        ("no_valid_scale_collapse", ["AMP406"]),
        ("static_loss_scale_overflow", ["AMP405"]),
        ("healthy_dead_relu_zero_grads", []),
        ("healthy_initial_scale_skips", []),
        ("nan_pixel_in_batch", ["AMP206"]),
    ],
)
def test_a_saved_profile_gives_the_same_settings(case, expected, tmp_path, check_report):
    from_file = recommend(ReplayRequest(factory=saved(tmp_path, case)))
    from_run = for_case(case)
    assert codes(from_file) == expected
    assert from_file.scaler["change"] == from_run.scaler["change"]
    assert from_file.scaler["recommended"] == from_run.scaler["recommended"]
    assert from_file.scaler["observed"] is None
    assert all(f.prescription is None or f.prescription.status == "not_run" for f in from_file.findings)
    assert any(s.what == "replay" for s in from_file.skipped)
    check_report(render_json(from_file))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "p.json does not exist"),
        ("not json", "is not the JSON"),
        ("[1]", "no profile section"),
        ('{"profile": null}', "no profile section"),
        ('{"profile": {}}', "lacks its 'measured'"),
        ("[" * 100_000, "is not the JSON"),
    ],
)
def test_what_is_no_profile_is_refused(text, sentence, tmp_path):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        recommend(ReplayRequest(factory=str(path)))
    assert sentence in str(caught.value)


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
def test_a_profile_that_is_no_regular_file_is_refused_without_reading(make, sentence, tmp_path):
    path = tmp_path / "p.json"
    make(path)
    with pytest.raises(UsageError) as caught:
        recommend(ReplayRequest(factory=str(path)))
    assert sentence in str(caught.value)


def test_a_profile_is_not_read_beyond_its_limit(tmp_path):
    path = tmp_path / "p.json"
    with path.open("wb") as sparse:
        sparse.truncate(MAX_BYTES + 1)
    with pytest.raises(UsageError, match="is larger than any profile"):
        recommend(ReplayRequest(factory=str(path)))


def test_a_dead_scaler_of_a_profile_is_read_as_it_was_written(tmp_path):
    path = Path(saved(tmp_path, "healthy_dead_relu_zero_grads"))
    data = json.loads(path.read_text())
    settings = {"scale": "NaN", "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    data["profile"]["measured"]["scaler"] = settings
    path.write_text(json.dumps(data))
    report = recommend(ReplayRequest(factory=str(path)))
    assert report.scaler["change"]
    assert report.scaler["recommended"]["init_scale"] >= 1


def test_a_truncated_profile_is_refused(tmp_path):
    path = Path(saved(tmp_path, "healthy_dead_relu_zero_grads"))
    path.write_text(path.read_text()[:-500])
    with pytest.raises(UsageError, match="is not the JSON"):
        recommend(ReplayRequest(factory=str(path)))


def test_from_the_command_line_and_from_a_saved_profile(tmp_path, run_cli, check_report):
    target = ("fixtures/corpus/runs.py:make_run", "--arg", 'case="scale_collapsed_then_underflow"')
    file = tmp_path / "p.json"
    assert run_cli("profile", *target, "--report", f"json={file}", cwd=ROOT).returncode == 1
    from_file = render_json(recommend(ReplayRequest(factory=str(file))))
    done = run_cli("recommend", *target, "--format", "json", cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert check_report(done.stdout)["scaler"]["recommended"] == check_report(from_file)["scaler"]["recommended"]


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ({"init_scale": 1024.0, "growth_interval": 0}, False),
        ({"init_scale": 1024.0, "backoff_factor": 0.0}, False),
        ({"init_scale": -1024.0}, False),
        ({"init_scale": float("inf")}, True),
        ({"init_scale": 0.0}, True),
    ],
)
def test_odd_settings_are_no_crash(arguments, change, check_report):
    report = for_run("odd_scaler", **arguments)
    assert report.scaler["change"] is change
    check_report(render_json(report))
