"""``torchrun --nproc-per-node 3 -m paceline.testing``: the whole table, on real processes.

Rank 0 prints one line per row, rule and check, and at the end, as JSON, what each row ends
with, to be compared between worlds. Exit status 1 if any check failed.
"""

from __future__ import annotations

import sys

import msgspec

import paceline
from paceline.testing.cases import CASES
from paceline.testing.checks import (
    CHECKS,
    RULES,
    CheckFailedError,
    final_parameters,
)


def main() -> int:
    """Run every row, rule and check; a broken law does not stop the others."""
    paceline.init()
    failed = 0
    ends: dict[str, list[float]] = {}
    for case in CASES:
        for rule in RULES:
            for name, check in CHECKS.items():
                text = "ok"
                try:
                    check(case, rule)
                except CheckFailedError as error:
                    failed += 1
                    text = f"FAILED on rank {paceline.rank()}: {error}"
                if paceline.rank() == 0 or text != "ok":
                    print(f"{case.name} {rule} {name}: {text}", file=sys.stderr)
            ends[f"{case.name} {rule}"] = final_parameters(case, rule)
    if paceline.rank() == 0:
        print(msgspec.json.encode(ends).decode(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
