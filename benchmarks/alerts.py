"""Does an alert come before the harm, and does it leave healthy trainings alone? Ours beside the rules in use.

Run: python benchmarks/alerts.py --collect [--seed 0] [--only text] [--cache build/alerts]
     python benchmarks/alerts.py --judge [--seed 0] [--only text] [--details]

`--collect` trains what the cache lacks, and may be stopped at any time. `--judge` reads the logs that are there, lets
each rule hear them line by line, and prints the tables as Markdown; with `--details`, a line for each training as well.
Rules are tuned on seed 0 alone; any other is for reporting.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.alerting import logs, scoring  # noqa: E402  # the repository is on the path only now
from benchmarks.alerting.logs import Record  # noqa: E402
from benchmarks.alerting.scoring import OURS, Alarm, Heard, Score  # noqa: E402


def collect(seed: int, only: str, cache: Path) -> int:
    """Train what the cache lacks, one training after the other, and say what became of it; return how many failed."""
    torch.set_num_threads(1)
    cache.mkdir(parents=True, exist_ok=True)
    failed = 0
    for kind, name in logs.names():
        if only not in name:
            continue
        began = time.process_time()
        try:
            records = logs.collect(kind, name, seed, cache)
        except AssertionError as error:  # a training that is not what it is held to be; the others are
            print(f"seed {seed}: {kind} {name}: FAILED: {error}", flush=True)
            failed += 1
            continue
        what = said_of(records[0]) if records else "no harm in any attempt"
        print(f"seed {seed}: {kind} {name}: {what} ({time.process_time() - began:.0f} s)", flush=True)
    return failed


def said_of(record: Record) -> str:
    """What a training was, in a line."""
    what = f"{record.task}, {record.steps} steps, a look every {record.every}"
    if record.harm is None:
        return what
    how = "sudden" if record.sudden else "creeping"
    return f"{what}, attempt {record.attempt}, wrong from {record.onset}, {how} harm at {record.harm}"


def judge(seed: int, only: str, cache: Path, *, details: bool) -> None:
    """Let every rule hear every log, and print how it did."""
    scores: dict[str, Score] = {}
    records = [record for record in logs.kept(seed, cache) if only in record.name]
    pair: tuple[Record, Heard] | None = None  # a sick one, whose twin is the next
    for record in records:
        heard = scoring.add(logs.lines(record, cache))
        add(scores, record, heard, pair)
        pair = (record, heard) if record.kind == "sick" else None
        if details:
            print(f"{record.kind} {record.name}: {said_of(record)}", flush=True)
            tell(record, heard)
    for spike, heard in scoring.hear_published(seed):
        for rule, alarms in heard.alarms.items():
            scoring.add_published(scores.setdefault(rule, Score()), spike, alarms)
        if details:
            print(f"{spike.name}: first jump at {spike.jump}")
            tell(None, heard)
    sick = [record for record in records if record.kind == "sick"]
    sudden = sum(record.sudden for record in sick)
    print(
        f"\nSeed {seed}: {len(sick)} trainings that end in harm, {sudden} of them at once; "
        f"{len(records) - len(sick)} healthy ones.\n\n{scoring.table(scores)}\n\n{by_mechanism(sick, scores[OURS])}"
    )


def add(scores: dict[str, Score], record: Record, heard: Heard, pair: tuple[Record, Heard] | None) -> None:
    """Count what the rules have said in a training; in a sick one, when its twin was heard as well."""
    if record.kind == "sick":
        return
    for rule, alarms in heard.alarms.items():
        score = scores.setdefault(rule, Score())
        scoring.add_healthy(score, alarms, heard.steps)
        if record.kind == "twin" and pair is not None:
            scoring.add_sick(score, pair[0], pair[1].alarms[rule], alarms)


def tell(record: Record | None, heard: Heard) -> None:
    """Print our alerts in a training."""
    for alarm in heard.alarms[OURS]:
        print(f"    {sentence(record, alarm)}", flush=True)


def sentence(record: Record | None, alarm: Alarm) -> str:
    """One of our alerts, and what it counts as."""
    finding = alarm.finding
    if finding is None:
        return f"step {alarm.step}"
    counts = ""
    if record is not None and record.kind == "sick":
        counts = "in time: " if scoring.in_time(record, [alarm]) else "too late, or too soon: "
    where = finding.where.tensor or finding.where.module
    what = f"{finding.code} {finding.severity} ({scoring.first_cause(finding)}, {where}): {finding.message}"
    return f"{counts}step {alarm.step} {what}"


def by_mechanism(sick: list[Record], ours: Score) -> str:
    """For each mechanism how often we were in time, in the order of the records."""
    of: Counter[str] = Counter()
    early: Counter[str] = Counter()
    leads = {sudden: iter(found) for sudden, found in ours.leads.items()}
    for record in sick:
        mechanism = record.name.rsplit("/", 1)[0]
        of[mechanism] += 1
        early[mechanism] += next(leads[record.sudden]) is not None
    rows = ["| what goes wrong | alarmed before the harm |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| {name} | {early[name]} of {count} |" for name, count in of.items())])


def main() -> int:
    """Collect, judge, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="train what the cache lacks")
    parser.add_argument("--judge", action="store_true", help="let all rules hear what is there")
    parser.add_argument("--seed", type=int, default=0, help="of all sizes, strengths and onsets")
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    parser.add_argument("--details", action="store_true", help="what ours says of each training")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "alerts", help="folder of the logs")
    asked = parser.parse_args()
    if not (asked.collect or asked.judge):
        parser.error("give --collect, --judge, or both")
    failed = collect(asked.seed, asked.only, asked.cache) if asked.collect else 0
    if asked.judge:
        if not logs.kept(asked.seed, asked.cache):
            parser.error(f"no training of seed {asked.seed} is kept in {asked.cache}: give --collect first")
        judge(asked.seed, asked.only, asked.cache, details=asked.details)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
