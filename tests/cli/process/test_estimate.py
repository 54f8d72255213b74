"""The estimate of a long run: said once, after three steps, whether or not a line of progress is shown."""

from __future__ import annotations

from ampdoctor.cli.progress import Estimate


def test_three_steps_are_timed_and_the_one_in_the_middle_counts(capsys):
    times, told = iter((0.0, 5.0, 5.2, 5.41, 9.0)), []
    estimate = Estimate(lambda *args, **options: told.append(args), clock=lambda: next(times))
    for done in range(6):
        estimate("replaying", done, 2000)
    said = capsys.readouterr().err
    assert said == "ampdoctor: 2,000 steps at 0.21 s: 7 min 00 s if none fails; Ctrl-C reports what is known by then\n"
    assert len(told) == 6


def test_a_run_of_three_steps_needs_none(capsys):
    estimate = Estimate(None, clock=iter((0.0, 1.0, 2.0, 3.0)).__next__)
    for done in range(4):
        estimate("replaying", done, 3)
    assert not capsys.readouterr().err
