"""Run every case on this rank, and say so; a job of three ranks runs this."""

import sys
import threading

import paceline
from tests.collectives.cases import CASES, run_case

if __name__ == "__main__":
    paceline.init()
    for name in sys.argv[1:] or CASES:
        run_case(name)
        print(f"rank {paceline.rank()} {name}: ok", flush=True)
    left = [thread.name for thread in threading.enumerate()]
    assert not [name for name in left if name.startswith("paceline case")], left
    print(f"rank {paceline.rank()} leaves nothing", flush=True)
