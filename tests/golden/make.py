"""``python -m tests.golden.make``: write down the behaviour of every row, as it is now.

For a behaviour that is meant to be another one, or for a row that is new. What changes shows
in the file's difference: one line per training.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.golden.trainings import behaviour_of, runs

FILE = Path(__file__).parent / "behaviour.jsonl"


def main() -> None:
    lines = [msgspec.json.encode(behaviour_of(run)) for run in runs()]
    FILE.write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    main()
