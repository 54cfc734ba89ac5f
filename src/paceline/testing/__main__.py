"""``torchrun --nproc-per-node 3 -m paceline.testing``: the whole table, on real processes.

Rank 0 prints one line per check that applies to a row and a rule, and at the end, as JSON, what each row ends
with that depends on no timing, to be compared between worlds. Exit status 1 if any check failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import msgspec

import paceline
from paceline.testing.cases import CASES
from paceline.testing.checks import RULES, WORLD_CHECKS, checks_of, final_parameters
from paceline.testing.trial import CheckFailedError


def main() -> int:
    """Run every check of every row and rule; a broken law does not stop the others."""
    paceline.init()
    failed = 0
    ends: dict[str, list[float]] = {}
    for name, law in WORLD_CHECKS.items():
        failed += not _holds(name, law)
    for case in CASES:
        for rule in RULES:
            for check in checks_of(case, rule, paceline.world_size()):
                name = f"{case.name} {rule} {check.name}"
                failed += not _holds(name, partial(check, case, rule))
            if case.timing_free:
                ends[f"{case.name} {rule}"] = final_parameters(case, rule)
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
