"""What the scripts in this folder share: where a built-in workload's file goes."""

import argparse
from pathlib import Path

PACKAGED = Path(__file__).parents[2] / "src" / "paceline" / "cluster" / "workloads"

# What a worker is assumed to sustain, FLOP/s: of the order of one accelerator of the years
# of these networks in single precision. Another rate scales all of a workload's seconds.
ASSUMED_RATE = 1e13


def write(workload, name):
    """Save it where ``--output`` says, or where paceline finds it by its name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=PACKAGED / f"{name}.json")
    output = parser.parse_args().output
    workload.save(output)
    print(
        f"{output}: {len(workload.names)} tensors, {sum(workload.sizes)} bytes, "
        f"forward {workload.forward_seconds:.6f} s, "
        f"backward {workload.backward_seconds:.6f} s"
    )
