"""Keeps what campaigns of faults have found: ``python -m benchmarks.measure.faults LOG COMMAND COMMIT``.

A LOG is what ``python -m tests.chaos --log LOG`` has written; COMMAND and COMMIT are those of that
campaign. The rows of its kind, real jobs, jobs on Ray or ports, replace the stored ones.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.papers.results import machine

RESULTS = Path(__file__).parents[1] / "results" / "chaos.jsonl"


def of_jobs(outcomes: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """By launcher: jobs, and faults that met a living process."""
    counts: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        names = outcome["tally"]
        [launcher] = [n.removeprefix("launcher: ") for n in names if "launcher: " in n]
        faults = [n.removeprefix("fault: ") for n in names if "fault: " in n]
        counts.update(f"{launcher}: {name}" for name in ["jobs", *faults])
        counts[f"{launcher}: violations"] += bool(outcome["violations"])
    yield from sorted(counts.items())


def of_ports(outcomes: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """By port: messages, and the memory by which the server has grown."""
    for outcome in outcomes:
        port = f"port {outcome['port']}"
        yield f"{port}: messages", sum(outcome["messages"].values())
        yield f"{port}: KiB", outcome["memory"] >> 10
        yield f"{port}: violations", len(outcome["violations"])


def kind(row: str) -> str:
    """Rows of one kind come from one campaign."""
    first = row.split(":")[0].split()[0]
    return first if first in ("port", "ray") else "jobs"


def store(log: Path, command: str, commit: str) -> None:
    outcomes = [json.loads(line) for line in log.read_text().splitlines()]
    found = of_ports(outcomes) if "port" in outcomes[0] else of_jobs(outcomes)
    about = {
        "command": command,
        "commit": commit,
        "machine": machine(),
        "seconds": round(max(outcome["elapsed"] for outcome in outcomes)),
    }
    rows = [{"row": row, "value": value, "unit": "", **about} for row, value in found]
    kinds = {kind(row["row"]) for row in rows}
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    kept = [row for row in kept if kind(row["row"]) not in kinds]
    lines = [json.dumps(row) for row in [*kept, *rows]]
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    store(Path(sys.argv[1]), *sys.argv[2:])
