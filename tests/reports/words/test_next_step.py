"""The last line: one action for each outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.evidence.location import Source
from ampdoctor.evidence.report import BaselineSection, Prescription, Report, Skipped
from ampdoctor.evidence.report_scaler import EmittedSettings
from ampdoctor.evidence.report_scan import ChangedTensor, TrendSection
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.reports.next_step import next_step
from tests.samples import EVERY, FIXED, HEALTHY, INCOMPLETE, NOT_REPRODUCED, NOTHING_CHANGED, OVERFLOW, SICK, UNDERFLOW

RUN = {"factory": "run.py:make_run"}
RUINED = replace(UNDERFLOW, code="AMP101", name="non-finite-weight", severity="error")
BASELINE = BaselineSection(file="known it.json", written=False, new=0, known=1, fixed=())


def said(report):
    return str(next_step(report))


def members(*verdicts):
    return [{"name": f"checkpoint-{step}", "verdict": verdict} for step, verdict in enumerate(verdicts)]


def scanned(*verdicts, first_sick=None, count=None):
    read = members(*verdicts)
    target = {"path": "runs", "location": "out/runs", "members": read, "count": count or len(read)}
    trend = TrendSection(unit="step", points=(), summary="", first_sick=first_sick, last_healthy=None, monotone=True)
    return Report(command="scan", target=target, verdict="sick", findings=(RUINED,), trend=trend)


def test_a_proved_change_is_pasted():
    assert said(SICK) == "paste the lines of the fix once the model is built, then run it again"


def test_code_is_changed_at_its_line():
    code = Prescription(kind="code", value="add eps", status="intervention")
    text = said(replace(SICK, findings=(replace(OVERFLOW, prescription=code),)))
    assert text == "change the code at t5.py:41 as AMP201 says: ampdoctor rule AMP201"


KEPT = {"kept": {"health": "health", "bundle": "health/bundle-20", "model": "train.py"}}
BUNDLE = "ampdoctor bisect-nan health/bundle-20 --model train.py"


@pytest.mark.parametrize(
    ("module", "line"),
    [("block.0", BUNDLE), (None, "ampdoctor rule AMP201")],
    ids=["the model's code", "what surrounds it is on the tape"],
)
def test_a_change_of_the_models_code_is_tried_on_the_bundle(module, line):
    code = Prescription(kind="code", value="add eps", status="intervention")
    finding = replace(OVERFLOW, prescription=code, where=replace(OVERFLOW.where, module=module))
    assert next_step(replace(SICK, command="run", run=KEPT, findings=(finding,))).line == line


def test_settings_that_no_replay_has_proved_are_a_line_to_paste():
    change = Prescription(kind="init_scale", value=2.0**20, status="not_run")
    lost = replace(UNDERFLOW, severity="error", prescription=change)
    report = Report(command="recommend", target={"profile": "p.st"}, verdict="sick", findings=(lost,))
    assert said(replace(report, scaler=SICK.scaler)).startswith("build your scaler with these settings: torch.amp.")
    assert said(replace(report, command="bisect-nan")) == "paste the lines of the fix, which no replay has proved"
    disproved = replace(lost, prescription=replace(change, status="failed"))
    assert said(replace(report, findings=(disproved,))) == "read what can be done: ampdoctor rule AMP301"


def test_a_sick_checkpoint_names_the_last_healthy_one():
    assert said(scanned("healthy", "healthy", "sick")) == (
        "resume from checkpoint-1, the last healthy one, and watch the training with ampdoctor run"
    )
    assert said(scanned("sick", "sick")).startswith("no earlier one is healthy")


def test_the_last_healthy_one_is_of_all_only_where_all_or_the_neighbours_were_read():
    read = ("healthy", "healthy", "sick", "sick")
    assert "checkpoint-1, the last healthy one," in said(scanned(*read, first_sick="checkpoint-2", count=9))
    assert "checkpoint-1, the last healthy one that was read (--all reads" in said(scanned(*read, count=9))


def test_what_was_not_reproduced_is_tried_nearer_to_the_failure():
    run = replace(NOT_REPRODUCED, target=RUN, run={"steps": 8})
    assert said(run).endswith("add --checkpoint")
    later = replace(run, target={**RUN, "checkpoint": "last.pt"})
    assert next_step(later).line == (
        "ampdoctor bisect-nan run.py:make_run --checkpoint last.pt --steps 16 --expect-failure"
    )


OPTIONS = {"--arg": ['case="a b"', "lr=1"], "--steps": ["8"], "--allow-partial": []}
GIVEN = "--allow-partial --arg 'case=\"a b\"' --arg lr=1"


def test_a_command_names_the_run_whole():
    target = {**RUN, "options": OPTIONS}
    replayed = replace(NOT_REPRODUCED, target=target, run={"steps": 8})
    later = replace(replayed, target={**target, "checkpoint": "last.pt"})
    further = "--checkpoint last.pt --steps 16 --expect-failure"
    assert next_step(later).line == f"ampdoctor bisect-nan run.py:make_run {GIVEN} {further}"
    measured = Report(command="profile", target=target, verdict="healthy")
    assert next_step(measured).line == f"ampdoctor recommend run.py:make_run {GIVEN} --steps 8"


def test_a_healthy_run_leads_to_what_comes_after_its_steps():
    further = (Skipped(what="further batches", reason="8 steps were asked for (--steps)", kind="not_replayed"),)
    run = Report(command="bisect-nan", target=RUN, verdict="healthy", run={"steps": 8}, skipped=further)
    assert said(run) == "if a later step fails, replay more: ampdoctor bisect-nan run.py:make_run --steps 16"
    script = replace(run, target={"factory": "train.py", "arguments": ["--lr", "1"]})
    assert next_step(script).line == "ampdoctor bisect-nan train.py --until-sick -- --lr 1"
    assert "ampdoctor run" in next_step(script).said
    fewer = replace(script, target={**script.target, "options": {"--steps": ["4"]}})
    assert next_step(fewer) == next_step(script), "--until-sick takes no --steps"
    farther = replace(script, target={**script.target, "options": {"--until-sick": []}})
    assert next_step(farther).line == "ampdoctor run train.py --lr 1"
    watched = replace(script, run={"steps": 8, "kept": {"health": "ampdoctor-health/1-train"}})
    assert next_step(watched).line == "ampdoctor health ampdoctor-health/1-train"


def test_a_bundle_without_weights_is_replayed_with_a_checkpoint_that_only_the_user_knows():
    kept = {"kept": {"bundle": "h/bundle-9", "from_checkpoint": True}}
    step = next_step(replace(INCOMPLETE, command="run", run=kept))
    assert step.line == "ampdoctor bisect-nan h/bundle-9"
    assert step.said.endswith("and add --checkpoint with one from before it")


@pytest.mark.parametrize("others", [["step-2.pt", "step-30.pt"], ["best.pt", "notes-20.txt"]], ids=["there", "none"])
def test_a_folder_is_named_only_where_other_checkpoints_lie_in_it(others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("step-10.pt", *others):
        (tmp_path / name).touch()
    report = Report(command="scan", target={"location": "step-10.pt"}, verdict="sick", findings=(RUINED,))
    assert next_step(report).line == ("ampdoctor scan ." if others[0] == "step-2.pt" else "")
    (tmp_path / "out-1").mkdir()
    monkeypatch.chdir(tmp_path / "out-1")
    assert next_step(replace(report, target={"location": "."})).line == ""  # where the command was run
    (tmp_path / "out-2").mkdir()
    assert next_step(replace(report, target={"location": "."})).line == "ampdoctor scan .."


def advice(precision, *remedies):
    return PrecisionAdvice(target="a100", precision=precision, why="it fits", remedies=remedies)


def test_the_precision_is_changed_before_the_scaler_and_a_remedy_is_last():
    report = Report(command="recommend", target=RUN, verdict="healthy", run={"precision": "fp16"}, scaler=SICK.scaler)
    other = next_step(replace(report, precision=advice("bf16")))
    assert str(other) == ('train in bf16, without a GradScaler: with torch.autocast("cuda", dtype=torch.bfloat16):')
    logits = "cross_entropy in the loss takes its log-softmax in fp16: give it logits.float()"
    same = replace(report, precision=advice("fp16", logits))
    assert next_step(same).line.startswith("torch.amp.GradScaler(")
    rested = replace(same, scaler=replace(SICK.scaler, change=False))
    assert next_step(rested).line == "torch.nn.functional.cross_entropy(logits.float(), target)"


def test_advice_is_watched_for_whom_it_was_given():
    target = {**RUN, "options": {"--steps": ["8"]}, "advice_options": {"--target": ["h100"]}}
    line = next_step(Report(command="recommend", target=target, verdict="healthy")).line
    assert line == "ampdoctor recommend run.py:make_run --steps 8 --target h100 --fail-on warning"
    broken = replace(
        UNDERFLOW, code="AMP206", severity="error", prescription=Prescription(kind="code", value="x", status="not_run")
    )
    report = Report(command="recommend", target=target, verdict="sick", findings=(broken,))
    assert said(report) == "find where it breaks: ampdoctor bisect-nan run.py:make_run --steps 8"
    sought = replace(report, command="bisect-nan")
    assert said(sought) == "lower the learning rate or clip the gradients"
    saved = Report(
        command="recommend", target={"profile": "a b.st", "advice_options": {"--target": ["h100"]}}, verdict="healthy"
    )
    assert next_step(saved).line == "ampdoctor recommend 'a b.st' --target h100 --fail-on warning"


def test_what_is_incomplete_is_mended_first():
    assert said(INCOMPLETE).startswith("mend or fetch anew shard-2.safetensors (truncated), then")
    assert said(replace(SICK, complete=False, errors=INCOMPLETE.errors * 3)).startswith("mend or fetch anew shard-2")
    assert "and 2 more" in said(replace(SICK, complete=False, errors=INCOMPLETE.errors * 3))


@pytest.mark.parametrize(
    ("command", "target", "step"),
    [
        ("scan", {"path": "x"}, "nothing; in CI"),
        ("bisect-nan", RUN, "nothing; if the run fails for you"),
        ("profile", RUN, "have settings derived from this: ampdoctor recommend run.py:make_run"),
        ("profile", {**RUN, "profile": "p.st"}, "have settings derived from this: ampdoctor recommend p.st"),
        ("recommend", RUN, "nothing; in CI"),
    ],
)
def test_health_says_how_to_keep_it(command, target, step):
    assert said(Report(command=command, target=target, verdict="healthy")).startswith(step)


def test_recommended_settings_are_a_line_to_paste():
    report = Report(command="recommend", target=RUN, verdict="healthy", scaler=SICK.scaler)
    assert next_step(report).line.startswith("torch.amp.GradScaler(init_scale=1048576.0, growth_factor=2.0,")
    settings = replace(SICK.scaler.recommended, init_scale=2.0**-12, growth_factor=1.0006933874625807)
    fine = replace(SICK.scaler, recommended=settings)
    line = next_step(replace(report, scaler=fine)).line
    assert line.startswith("torch.amp.GradScaler(init_scale=0.000244140625, growth_factor=1.0006933874625807, ")
    emitted = EmittedSettings(framework="deepspeed", language="json", text="{}", notes=())
    emitted = replace(report, scaler=replace(SICK.scaler, emit=emitted))
    assert said(emitted) == "put the settings shown into your configuration"


def test_a_profile_with_losses_leads_to_settings_and_one_without_ranges_to_the_page():
    report = Report(command="profile", target=RUN, verdict="sick", findings=(replace(UNDERFLOW, severity="error"),))
    assert said(report) == "have settings derived from this: ampdoctor recommend run.py:make_run"
    broken = replace(report, findings=(replace(UNDERFLOW, code="AMP206", severity="error"),))
    assert said(broken) == "read what can be done: ampdoctor rule AMP206"


@pytest.mark.parametrize("code", ["AMP911", "AMP912"])
def test_the_configuration_is_mended_where_nothing_else_counts(code):
    stale = replace(UNDERFLOW, code=code)
    note = replace(UNDERFLOW, severity="note")
    assert said(replace(HEALTHY, findings=(stale, note))).startswith("mend the configuration")
    raised = replace(stale, severity="error")
    assert said(replace(HEALTHY, verdict="sick", findings=(raised,))).startswith("mend the configuration")
    assert said(replace(HEALTHY, verdict="sick", findings=(RUINED, raised))).startswith("resume")
    assert said(replace(HEALTHY, findings=(stale, UNDERFLOW))) == f"read what can be done: ampdoctor rule {code}"


def test_an_error_by_decision_is_no_reason_to_go_back():
    raised = replace(UNDERFLOW, code="AMP104", severity="error")
    assert said(replace(HEALTHY, verdict="sick", findings=(raised,))) == "read what can be done: ampdoctor rule AMP104"
    assert said(replace(scanned("healthy", "sick"), findings=(raised,))).endswith("ampdoctor rule AMP104")


def test_a_baseline_with_fixed_entries_is_written_anew():
    report = replace(HEALTHY, baseline=replace(BASELINE, fixed=(FIXED,)))
    assert said(report) == "write the baseline anew: add --write-baseline 'known it.json'"
    assert said(replace(report, findings=(UNDERFLOW,))) == "read what can be done: ampdoctor rule AMP301"


def compared(old_nonfinite, scale):
    tensor = ChangedTensor(
        name="fc.weight",
        role="weight",
        entry="weight",
        dtype="float16",
        old_dtype="float16",
        shape=(2,),
        unchanged=0.0,
        relative_change=0.5,
        amax=1.0,
        old_amax=1.0,
        nonfinite=1,
        old_nonfinite=old_nonfinite,
    )
    change = replace(NOTHING_CHANGED, old=replace(NOTHING_CHANGED.old, scale=scale), tensors=(tensor,))
    target = {"path": "new.pt", "against": {"path": "old.pt", "location": "out/old.pt"}}
    return Report(command="scan", target=target, verdict="sick", findings=(RUINED,), change=change)


@pytest.mark.parametrize("scale", [None, 65536.0])
def test_an_older_checkpoint_that_is_finite_is_where_to_resume(scale):
    assert said(compared(0, scale)) == (
        "resume from old.pt, which is finite, and watch the training with ampdoctor run"
    )


@pytest.mark.parametrize("name", EVERY)
def test_every_report_has_one(name):
    assert said(EVERY[name])


def test_a_packages_own_line_is_never_the_users_to_change():
    code = Prescription(kind="code", value="add eps", status="intervention")
    where = replace(OVERFLOW.where, source=Source("accelerate/accelerator.py", 2955, installed=True))
    text = said(replace(SICK, findings=(replace(OVERFLOW, prescription=code, where=where),)))
    assert text.startswith("change your own code as AMP201 says (the line shown is an installed package's)")
    assert "accelerator.py" not in text


@pytest.mark.parametrize(
    ("kept", "step"), [({"health": "h"}, "nothing; its log is judged by: ampdoctor health h"), ({}, "nothing")]
)
def test_a_training_without_anything_sick_leaves_its_log(kept, step):
    assert said(Report(command="run", target={"factory": "train.py"}, run={"kept": kept}, verdict="not_judged")) == step
