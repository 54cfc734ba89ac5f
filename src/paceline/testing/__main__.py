"""``torchrun --nproc-per-node 3 -m paceline.testing``: the whole table, on real processes.

Rank 0 prints one line per check that applies to a row and a rule, and at the end, as JSON, what each row ends
with that depends on no timing, to be compared between worlds. Exit status 1 if any check failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

import paceline
from paceline.testing.cases import CASES, Case
from paceline.testing.checks import (
    RULES,
    WORLD_CHECKS,
    Trial,
    final_parameters,
    trials,
)
from paceline.testing.trial import CheckFailedError


def main() -> int:
    """Run the whole table; a broken law does not stop the others."""
    paceline.init()
    return run_table(
        trials(paceline.world_size()), [(c, r) for c in CASES for r in RULES]
    )


def run_table(chosen: Sequence[Trial], rows: Sequence[tuple[Case, str]]) -> int:
    """Run the checks of the world, those that were *chosen*, and to their ends those of the
    *rows* that depend on no timing. Returns the exit status."""
    failed = sum(not _holds(name, law) for name, law in WORLD_CHECKS.items())
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
