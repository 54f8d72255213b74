"""Which changes to files are told, and whose."""

from __future__ import annotations

import shutil
import threading

from ampdoctor.evidence.log_records import EndLine, RunLine
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.replay.user_files import told_of_changes


def test_our_log_writes_beside_the_run_and_is_none_of_its_changes(tmp_path):
    """Its thread would be ended where a change ends what makes it."""
    told = []
    with told_of_changes([tmp_path], lambda did, _place: told.append(did)):
        log = RunLog(tmp_path / "health", RunLine(name="run"))
        log.describe(script={"command": ["train.py"]})
        log.write(EndLine(exit_code=0, steps=0, accepted=0))
        log.close()
    assert sorted(file.name for file in (tmp_path / "health").iterdir()) == ["log.jsonl", "run.json"]
    assert told == []


def test_a_thread_of_the_run_that_calls_only_python_is_told_of(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.pt").write_text("here")
    told = []
    with told_of_changes([tmp_path], lambda did, _place: told.append(did)):
        thread = threading.Thread(target=shutil.rmtree, args=(tmp_path / "old",))
        thread.start()
        thread.join()
    assert [did.split()[0] for did in told] == ["removes"]
