"""Runs one tool over the corpus, every case in a process of its own, and prints one JSON object a line.

Run: python -m benchmarks.peers.worker TOOL [--case CASE ...] [--timeout SECONDS]

The first line says whether the tool runs here, and its version. Cases are forked from a process that has imported the
tool and the cases' libraries already: no case pays for start-up, and none sees what another left behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.peers.answer import Tool, opened
from benchmarks.peers.scoring import Outcome
from benchmarks.peers.tools import TOOLS
from fixtures.corpus import runs


def examine(tool: Tool, case: str, reply: Connection) -> None:
    """Diagnose one case; the body of a case's own process."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  # a device and no file: what tools print is not read here
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())
        warnings.simplefilter("ignore")
        with opened(case) as made:
            start = time.perf_counter()
            answer, failure = None, None
            try:
                answer = tool(made)
            except Exception:  # noqa: BLE001  # a tool that fails is a result
                failure = traceback.format_exc().strip().splitlines()[-1]
            reply.send((answer, failure, time.perf_counter() - start))


def outcome(tool: Tool, case: str, timeout: float) -> Outcome:
    """Diagnose one case in a process of its own."""
    forks = multiprocessing.get_context("fork")
    mine, its = forks.Pipe(duplex=False)
    process = forks.Process(target=examine, args=(tool, case, its))
    process.start()
    its.close()
    try:
        answered = mine.poll(timeout)
        answer, failure, seconds = mine.recv() if answered else (None, f"no answer in {timeout:.0f} s", timeout)
    except EOFError:
        process.join()
        answer, failure, seconds = None, f"its process ended with exit code {process.exitcode}", 0.0
    process.kill()
    process.join()
    return Outcome(case, answer, seconds, failure)


def say(**line: Any) -> None:
    """Print one object."""
    print(json.dumps(line), flush=True)


def main() -> int:
    """Read the options and examine the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--case", action="append", help="default: the whole corpus")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    entry, cases = TOOLS[options.tool], options.case or runs.case_ids()
    try:
        with warnings.catch_warnings(action="ignore"):
            for case in cases:
                runs.load_case(case)  # and what it imports
            tool = entry.load()
    except Exception as error:  # noqa: BLE001  # a tool that cannot be imported is a row with the reason
        say(unusable=f"{type(error).__name__}: {error}".splitlines()[0])
        return 0
    say(version=entry.version(), torch=torch.__version__)
    for case in cases:
        say(outcome=asdict(outcome(tool, case, options.timeout)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
