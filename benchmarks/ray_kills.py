"""A Ray cluster of several nodes on this machine, whose workers, server and nodes are killed again
and again: each job ends, and has applied each step once.

python benchmarks/ray_kills.py --kills 5
python benchmarks/ray_kills.py --kills 5 --killed server  # one row alone
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "tests" / "integrations" / "scripts" / "of_ray.py"
ROWS = [
    ("worker", "backup"),
    ("worker", "asp"),
    ("server", "backup"),
    ("node", "backup"),
    ("server's node", "backup"),
    ("both nodes", "backup"),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--killed", choices=sorted({what for what, _ in ROWS}))
    chosen = parser.parse_args()
    print("| killed | times | method | steps | applied | lives of workers | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            f"{method}:{chosen.kills}:{what}"
            for what, method in ROWS
            if chosen.killed in (None, what)
        ]
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), folder, *rows],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("=== "):
                print(row_of(json.loads(line.removeprefix("=== "))), flush=True)
        sys.exit(process.wait())


def row_of(told: dict[str, Any]) -> str:
    applied = f"{told['moved']:g} steps"
    if told["method"] == "asp":
        applied = f"{2 * told['moved']:g} gradients, {told['noted']} noted"
    lives = " + ".join(str(one["life"] + 1) for one in told["results"])
    return (
        f"| {told['what']} | {told['kills']} | {told['method']} | {told['last'] + 1} of "
        f"{told['steps']} | {applied} | {lives} | {told['seconds']:.0f} |"
    )


if __name__ == "__main__":
    main()
