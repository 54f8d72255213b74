"""A Trainer's and a Lightning job on two processes: watched it is the bare one, and the sick rank has the cause."""

from pathlib import Path

import pytest

for name in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(name)

from tests.live.distributed.jobs import assert_same, both, looks  # noqa: E402

SCRIPT = Path(__file__).with_name("several.py")


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_a_nan_in_one_ranks_batch_is_found_there_and_the_job_goes_on(python, framework, tmp_path):
    bare, run = both(python, SCRIPT, f"{framework}+bad", tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    found = [[one["code"] for look in looks(tmp_path, rank) for one in look.get("findings", [])] for rank in (0, 1)]
    assert sorted(found) == [[], ["AMP204"]]
    assert all(len(looks(tmp_path, rank)) == 1 for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_a_healthy_job_is_the_bare_job_and_nothing_is_said(python, framework, tmp_path):
    bare, run = both(python, SCRIPT, framework, tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert looks(tmp_path, 0) == looks(tmp_path, 1) == []
    assert run.stderr.count("ampdoctor: ") == 2
    assert run.stderr.count("ampdoctor: watching ") == run.stderr.count(" steps watched, ") == 1
