"""Measures the network and writes the results to a file.

``paceline probe`` launches this script on every worker.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from paceline.cluster.probe.measure import SIZES, measure
from paceline.runtimes.join import join_runtime


def main() -> None:
    """Measure, and write the results on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds-per-pair", type=float, default=0.1)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    arguments = parser.parse_args()
    runtime = join_runtime()
    runtime.connect()

    def on_progress(text: str) -> None:
        if runtime.rank == 0:
            print(f"probe: {text}", file=sys.stderr, flush=True)

    findings = measure(
        runtime,
        seconds_per_pair=arguments.seconds_per_pair,
        largest=arguments.largest,
        on_progress=on_progress,
    )
    if runtime.rank == 0:
        arguments.output.write_bytes(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
