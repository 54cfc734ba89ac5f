"""Checks the conformance table in real processes: ``torchrun --nproc-per-node 3 -m paceline.testing``.

``--one-in 8`` checks a sample, ``--row ds-sync`` the rows with this in their name. Rank 0 prints one line per
check of a row under a bucket rule. At the end it prints the final parameters of all rows whose result does not
depend on timing, as JSON, to be compared between runtimes. Exit status 1 if any check failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec

import paceline
from paceline.testing.cases import CASES, Case
from paceline.testing.method_checks import (
    RULES,
    RUNTIME_CHECKS,
    Trial,
    final_parameters,
    sample,
    trials,
)
from paceline.testing.problems import CheckFailedError


def main() -> int:
    """Run the whole table; a failed check does not stop the others."""
    parser = argparse.ArgumentParser(prog="python -m paceline.testing")
    parser.add_argument("--one-in", type=int, default=1, metavar="N")
    parser.add_argument("--row", default="", metavar="WORD")
    arguments = parser.parse_args()
    every, cases = arguments.one_in, [c for c in CASES if arguments.row in c.name]
    if every < 1:
        parser.error(f"--one-in: expected 1 (all) or more, got {every}")
    if not cases:
        names = ", ".join(case.name for case in CASES)
        parser.error(f"--row {arguments.row}: expected a part of one of {names}")
    paceline.init()
    chosen = sample(trials(paceline.world_size(), cases), every)
    return run_table(chosen, rows(cases, every))


def rows(cases: Sequence[Case], every: int) -> list[tuple[Case, str]]:
    """The rows whose final parameters are printed: all cases under all rules, or each under one."""
    if every == 1:
        return [(case, rule) for case in cases for rule in RULES]
    return [(case, RULES[n % len(RULES)]) for n, case in enumerate(cases)]


def run_table(chosen: Sequence[Trial], rows: Sequence[tuple[Case, str]]) -> int:
    """Run the runtime's checks and the *chosen* trials, and train those *rows* to the end whose result does not
    depend on timing. Returns the exit status."""
    failed = sum(not _holds(name, law) for name, law in RUNTIME_CHECKS.items())
    failed += sum(not _holds(trial.name, trial.run) for trial in chosen)
    ends = {
        f"{case.name} {rule}": final_parameters(case, rule)
        for case, rule in rows
        if case.timing_free
    }
    if paceline.rank() == 0:
        print(msgspec.json.encode(ends).decode(), flush=True)
    return 1 if failed else 0


def _holds(name: str, check: Callable[[], None]) -> bool:
    text = "ok"
    try:
        check()
    except CheckFailedError as error:
        text = f"FAILED on rank {paceline.rank()}: {error}"
    if paceline.rank() == 0 or text != "ok":
        print(f"{name}: {text}", file=sys.stderr)
    return text == "ok"


if __name__ == "__main__":
    sys.exit(main())
