"""Laws of a `Comm` that hold in every runtime: each case runs on three workers.

A case is called with a communicator of its own.
"""

from __future__ import annotations

from paceline.collectives.communicator import Communicator
from paceline.runtimes.join import join_runtime
from tests.collectives import averages, halves, messages, works

CASES = {
    case.__name__: case
    for case in (*works.CASES, *messages.CASES, *averages.CASES, *halves.CASES)
}


def run_case(name: str) -> None:
    """Run a case on this worker."""
    runtime = join_runtime()
    comm = Communicator(runtime, f"case {name}")
    CASES[name](comm)
    comm.close()
