"""A run that goes on from its checkpoint until a step is not finite: batches, losses and step are the training's."""

from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.errors import UsageError
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows.opening import late_runs

FACTORY = "tests.workflows.opening.late_runs:make_run"


def request(file, options, **more):
    arguments = {name: value for name, value in options.items() if value is not None}
    return ReplayRequest(factory=FACTORY, arguments=arguments, checkpoint=file, until_sick=True, **more)


def assert_same_batches(asked, trained, saved_at, end):
    """What is drawn behind the checkpoint is what the loop drew."""
    with open_replay(asked) as replay:
        session = replay.session()
        for step in range(end - saved_at):
            assert session.has_step(step)
            for mine, theirs in zip(session.batches_of(step), trained.steps[saved_at + step], strict=True):
                assert mine[0].tolist() == theirs[0].tolist()
                assert torch.equal(mine[1], theirs[1])
        session.close()


def losses_of(report):
    return {row.step: row.without.loss for row in report.proof.steps if row.without is not None}


def assert_found(report, trained, saved_at):
    finding = report.findings[0]
    step = trained.failed - saved_at
    assert (report.verdict, finding.where.step, finding.where.global_step) == ("sick", step, trained.failed)
    seen = losses_of(report)
    assert {at: loss for at, loss in seen.items() if at < step} == {
        at: trained.losses[saved_at + at] for at in seen if at < step
    }


def test_the_training_goes_on_from_its_checkpoint_to_its_failure(tmp_path, check_report):
    file, options = str(tmp_path / "last.pt"), {"rate": 1000.0, "accumulation": 2}
    trained = late_runs.train(100, 20, file, **options)
    assert trained.failed > 40
    asked = request(file, options, max_steps=100)
    report = bisect_nan(asked)
    assert_found(report, trained, 20)
    assert report.findings[0].code == "AMP201"
    assert report.findings[0].prescription.verified
    assert_same_batches(asked, trained, 20, trained.failed + 1)
    check_report(render_json(report))
    assert report.target["options"]["--until-sick"] == []
    (note,) = [note for note in report.run["notes"] if "lie behind the checkpoint" in note]
    assert note.startswith("40 batches lie behind the checkpoint and were passed over unloaded")
    assert note.endswith("10 batches into epoch 2")
    assert not any("random" in skipped.reason for skipped in report.skipped)


def test_one_bad_sample_of_an_epoch_comes_at_its_own_step(tmp_path):
    file, saved_at, fails = str(tmp_path / "last.pt"), 20, 40
    options = {"rate": 0.01, "rows": 10 * fails}
    sound = late_runs.train(fails + 1, saved_at, file, **options)
    bad = int(sound.steps[fails][0][0][2])
    trained = late_runs.train(fails + 1, saved_at, file, **options, bad=bad)
    assert trained.failed == fails
    late_runs.Numbered.loaded = 0
    report = bisect_nan(request(file, {**options, "bad": bad}))
    assert late_runs.Numbered.loaded <= 4 * (fails - saved_at + 6)
    assert_found(report, trained, saved_at)
    assert bad in trained.steps[fails][0][0]


def test_a_run_that_stays_finite_says_what_was_not_looked_at(tmp_path, check_report):
    file, options = str(tmp_path / "last.pt"), {"rate": 0.01}
    late_runs.train(5, 5, file, **options)
    report = bisect_nan(request(file, options, max_steps=20))
    check_report(render_json(report))
    assert (report.verdict, report.run["steps"]) == ("healthy", 20)
    compared = next(check for check in report.checks if check.name == "gradients and updates agree with fp32")
    assert (compared.result, compared.headroom["steps"]) == ("ok", 8)
    left_out = {skipped.what: skipped.reason for skipped in report.skipped}
    assert "the last 8 were held beside fp32" in left_out["comparison of every step with fp32"]
    assert "may not come back here" in left_out["other hardware and other numbers of ranks"]
    assert left_out["further batches"] == "20 steps were asked for (--max-steps)"
    again = bisect_nan(request(file, options, max_steps=20, expect_failure=True))
    (note,) = again.findings
    assert (again.verdict, note.code) == ("not_reproduced", "AMP902")
    assert "what hangs on the number of ranks is not seen" in note.help
    assert "the data are those that followed step 5" in note.help
    assert "only 20 steps were replayed (--max-steps)" in note.help


def test_single_skips_of_a_scaler_at_work_do_not_end_it():
    def make_run():
        run = late_runs.make_run(rate=0.01)
        run.scaler = {"init_scale": 2.0**20, "growth_interval": 12}
        return run

    report = bisect_nan(ReplayRequest(factory=make_run, until_sick=True, max_steps=60))
    skips = next(check for check in report.checks if check.name == "steps skipped by the scaler")
    assert int(skips.result.split()[0]) > 2
    assert (report.verdict, report.run["steps"]) == ("healthy", 60)


@pytest.mark.parametrize("at", [13, 0])
def test_ctrl_c_reports_what_is_known(at, tmp_path, check_report):
    file, options = str(tmp_path / "last.pt"), {"rate": 0.01}
    late_runs.train(5, 5, file, **options)
    before = torch.get_rng_state()

    def progress(what, done, total, *, unit=""):
        if (what, done) == ("replaying", at):
            raise KeyboardInterrupt

    asked = request(file, options, max_steps=40)
    if not at:
        with pytest.raises(KeyboardInterrupt):
            bisect_nan(asked, progress=progress)
        return
    report = bisect_nan(asked, progress=progress)
    check_report(render_json(report))
    (error,) = report.errors
    assert (report.verdict, report.complete, report.run["steps"]) == ("inconclusive", False, 13)
    said = "interrupted by Ctrl-C: steps 0 to 12 were replayed and stayed finite (the training's 5 to 17)"
    assert (error.kind, error.message) == ("interrupted", said)
    assert torch.equal(torch.get_rng_state(), before)
    assert "more time" in str(next_step(report))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"until_sick": True, "steps": 4}, "--until-sick runs on for --max-steps, and --steps 4 says another number"),
        ({"max_steps": 4}, "--max-steps bounds --until-sick"),
        ({"until_sick": True, "max_steps": 0}, "max_steps is 0"),
        ({"skip_batches": -1}, "skip_batches is -1"),
        ({"skip_batches": "checkpoint"}, "give --checkpoint"),
    ],
)
def test_options_that_say_two_things(options, said):
    with pytest.raises(UsageError, match=said):
        ReplayRequest(factory=FACTORY, **options)


def test_what_a_checkpoint_lacks_is_said(tmp_path):
    file, options = str(tmp_path / "last.pt"), {"rate": 0.01}
    late_runs.train(5, 5, file, **options)
    saved = torch.load(file)
    torch.save({"model": saved["model"], "optimizer": saved["optimizer"], "scaler": saved["scaler"]}, file)
    report = bisect_nan(request(file, options, max_steps=8))
    reasons = [skipped.reason for skipped in report.skipped]
    for said in ("no schedule of the learning rate", "no random state of torch", "the file says no step"):
        assert any(said in reason for reason in reasons), reasons
    assert report.verdict == "healthy"
    assert math.isclose(report.checks[0].headroom["steps"], 8)
