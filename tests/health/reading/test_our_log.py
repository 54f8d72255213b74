from __future__ import annotations

from ampdoctor.evidence.run_log.lines import EndLine, RunLine, StepLine
from ampdoctor.evidence.run_log.text import text_of
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.opening import find_log
from tests.health.logs import HEADER, stamped, steps, write


def read(path):
    noticed = Noticed()
    found = find_log(path)
    assert found.kind.format == "ampdoctor"
    return list(found.lines(noticed)), noticed


def numbers(lines):
    return [(one.stamp.rank, one.line.step) for one in lines if isinstance(one.line, StepLine)]


def test_files_of_a_rank_are_read_oldest_first_and_ranks_one_after_the_other(tmp_path):
    write(tmp_path / "log.jsonl", [HEADER, *steps(4, 6), EndLine(exit_code=0)])
    write(tmp_path / "log.1.jsonl", [HEADER, *steps(0, 2)])
    write(tmp_path / "log.2.jsonl", [HEADER, *steps(2, 4)])
    write(tmp_path / "log.rank1.jsonl", [HEADER, *steps(0, 1)], rank=1, world_size=2)
    lines, noticed = read(tmp_path)
    assert numbers(lines) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]
    assert not noticed.damaged


def test_a_file_is_read_alone_and_whatever_its_name(tmp_path):
    write(tmp_path / "log.1.jsonl", [HEADER, *steps(0, 2)])
    write(tmp_path / "mine.txt", [HEADER, *steps(7, 8)])
    assert numbers(read(tmp_path / "mine.txt")[0]) == [(0, 7)]


def test_damaged_lines_are_counted_and_a_last_one_that_was_cut_off_is_not(tmp_path):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 3)])
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([whole[0], whole[1], '{"kind":"step","run_id":"7f"\n', whole[2], whole[3][:40]]))
    lines, noticed = read(tmp_path)
    assert numbers(lines) == [(0, 0), (0, 1)]
    assert noticed.damaged == {"log.jsonl": 1}


def test_a_growing_log_is_read_as_far_as_it_went_when_it_was_opened(tmp_path):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 2)])
    lines = find_log(tmp_path).lines(Noticed())
    seen = [next(lines), next(lines)]
    with path.open("a") as file:
        file.write(text_of(stamped(StepLine(step=2))))
    assert numbers([*seen, *lines]) == [(0, 0), (0, 1)]


def test_lines_of_another_version_and_unknown_kinds_are_passed_by(tmp_path):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 1)])
    with path.open("a") as file:
        file.write('{"kind":"weather","run_id":"7f","time_ms":0,"schema_version":1}\n')
        file.write('{"kind":"step","run_id":"7f","time_ms":0,"step":9,"schema_version":99}\n')
    lines, noticed = read(tmp_path)
    assert [type(one.line) for one in lines] == [RunLine, StepLine]
    assert not noticed.damaged
