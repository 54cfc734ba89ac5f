"""Kills aggregators and workers of jobs whose sums are formed by aggregators, at random instants, and counts
how the jobs end.

    python -m benchmarks.aggregator_kills --kills 50

*An aggregator dies*: the job has to end well, with the bits of one that nobody disturbed. *A worker
dies*: all others have to end with an error, within some seconds. Every second kill is of a worker.
A job is four workers in two racks; rina and atp take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from pathlib import Path

from tests.collectives.in_network.test_real import (
    aggregators,
    digests,
    learnt,
    racks,
    ranks_of,
)
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

WORKERS, STEPS = 4, "60"
ROWS = ("rina", "atp")
RUNNING_SECONDS = 1.0
"""How long the steps take, about."""
PROMPT_SECONDS = 10


def main() -> None:
    """Print a line for each kill, and a table of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    choose = random.Random(arguments.seed)
    undisturbed = {row: _trained(row) for row in ROWS}
    ends: dict[tuple[str, str], list[str]] = {}
    for number in range(arguments.kills):
        victim, row = ("aggregator", "worker")[number % 2], ROWS[number // 2 % 2]
        after = choose.uniform(0, RUNNING_SECONDS)
        which = choose.randrange(2 if victim == "aggregator" else WORKERS)
        try:
            if victim == "aggregator":
                ended = _aggregator_killed(row, which, after, undisturbed[row])
            else:
                ended = _worker_killed(row, which, after)
        except AssertionError as error:
            ended = f"failed: {error}"
        ends.setdefault((victim, row), []).append(ended)
        print(f"{number + 1:3} {row:5} {victim} {which} after {after:.2f} s: {ended}")
    print("\n| killed | collective | kills | in mid-run | too late | failed |")
    print("|---|---|---|---|---|---|")
    for (victim, row), of in ends.items():
        failed = sum(one.startswith("failed") for one in of)
        late = of.count("too late")
        print(
            f"| {victim} | {row} | {len(of)} | {len(of) - late - failed} | {late} | {failed} |"
        )


def _trained(row: str) -> str:
    with _job(row) as (_, ranks):
        return learnt(ranks)[0]


@contextlib.contextmanager
def _job(row: str):
    with tempfile.TemporaryDirectory() as place, aggregators(2) as them:
        variables = them.variables | racks(Path(place), 2)
        with ranks_of(WORKERS, [row, STEPS], variables) as ranks:
            yield them, ranks


def _begun(ranks) -> None:
    wait_until(lambda: "step 1\n" in ranks[0].stdout, SECONDS, "the first step")


def _aggregator_killed(row: str, which: int, after: float, undisturbed: str) -> str:
    with _job(row) as (them, ranks):
        _begun(ranks)
        time.sleep(after)
        them.kill(which)
        found, said = learnt(ranks)
        assert found == undisturbed, "other bits than those of the undisturbed job"
        return "around the ring" if "go around the ring" in said else "too late"


def _worker_killed(row: str, which: int, after: float) -> str:
    with _job(row) as (_, ranks):
        _begun(ranks)
        time.sleep(after)
        ranks[which].kill()
        killed = time.monotonic()
        ends = [rank.done() for rank in ranks]
        took = time.monotonic() - killed
        others = [end.returncode for rank, end in enumerate(ends) if rank != which]
        if all(code == 0 for code in others):
            assert len(digests([e for r, e in enumerate(ends) if r != which])) == 1
            return "too late"
        assert all(others), f"exit statuses {others}"
        assert took < PROMPT_SECONDS, f"the others ended after {took:.1f} s"
        return f"all ended within {took:.1f} s"


if __name__ == "__main__":
    main()
