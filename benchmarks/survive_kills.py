"""Kills workers and servers of jobs that survive, and counts how the jobs end: all have to end well, with
one model, and to leave no process, file or shared memory. Run it alone: any other program's shared memory counts.

    python -m benchmarks.survive_kills --kills 40 --server-kills 20

A worker is killed in the last second of its job or after its last step. A server is killed at any step, and
the job has to end with the bits of one that nobody disturbed. The processes of a job are forked and not
started anew; a kill takes some seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

import torch
from tests.support.lives import done_in, life_of, servers_of, wait_in
from tests.support.processes import kill, run

WORKERS = 3
METHODS = ("backup:wait_for=2", "asp", "ssp:staleness=2", "gssp")
PAUSE = 0.1
LAST_SECOND = 1.2
"""How long after the first step the first kill comes at the latest: six steps take about 0.7 s, and the end follows."""
SERVER_ROW = "the server, backup"
SERVER_STEPS = 40


def main() -> None:
    """Print a line for each kill, and a table of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--kills", type=int, default=40, help="of workers that had not ended yet"
    )
    parser.add_argument("--server-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    choose = random.Random(arguments.seed)
    found: dict[str, list[str]] = {method: [] for method in METHODS}
    latest = dict.fromkeys(METHODS, LAST_SECOND)
    for number in range(arguments.kills):
        method, rank = METHODS[number % len(METHODS)], choose.randrange(WORKERS)
        ended = "had ended"
        while ended == "had ended":
            after = choose.uniform(latest[method] / 3, latest[method])
            ended = _killed(method, rank, after)
            found[method].append(ended)
            print(
                f"{number + 1:3} {method:18} worker {rank} after {after:.2f} s: {ended}"
            )
            # A kill that comes too late tells where the end is: the next ones come about there.
            latest[method] *= 0.9 if ended == "had ended" else 1.05
    if arguments.server_kills:
        found[SERVER_ROW] = _servers_killed(arguments.server_kills, choose)
    print(
        "\n| killed | kills | started again | ended before | failed |\n|---|---|---|---|---|"
    )
    for method, ends in found.items():
        again, before = ends.count("started again"), ends.count("had ended")
        print(
            f"| {method} | {len(ends)} | {again} | {before} | {len(ends) - again - before} |"
        )


def _killed(method: str, rank: int, after: float) -> str:
    """How a job has ended whose worker was killed so many seconds after its first step."""
    memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options = ["--survive", f"--method={method}"]
        words = ("survive_end.py", folder, rank, "nowhere")
        job = run(
            WORKERS,
            *words,
            options=options,
            folder=folder / "job",
            forked="all",
            PAUSE=str(PAUSE),
        )
        try:
            first = f"worker {rank} life 0 step 0"
            wait_in(job, lambda: first in job.stdout, "the first step")
            time.sleep(after)
            kill(life_of(folder, rank)[0])
            job.wait().check_ended_well()
            results = [torch.load(folder / f"result-{w}") for w in range(WORKERS)]
            assert all(torch.equal(result, results[0]) for result in results), results
            assert set(os.listdir("/dev/shm")) <= memory, "shared memory is left"
        except AssertionError as error:
            return f"failed: {error}"
        finally:
            job.stop()
        return "started again" if "it is started again" in job.stderr else "had ended"


def _servers_killed(kills: int, choose: random.Random) -> list[str]:
    """How jobs have ended whose server was killed after a random step of worker 0."""
    with tempfile.TemporaryDirectory() as place:
        expected = _trained(Path(place), None)
    found = []
    for number in range(kills):
        step = choose.randrange(1, SERVER_STEPS)
        with tempfile.TemporaryDirectory() as place:
            try:
                results = _trained(Path(place), step)
                same = all(map(torch.equal, results, expected))
                assert same, "not the bits of the undisturbed job"
                ended = "started again"
            except AssertionError as error:
                ended = f"failed: {error}"
        found.append(ended)
        print(f"{number + 1:3} {SERVER_ROW:18} after step {step:2}: {ended}")
    return found


def _trained(folder: Path, killed_after: int | None) -> list[torch.Tensor]:
    """The models of all workers at the end of a job."""
    memory = set(os.listdir("/dev/shm"))
    (folder / "go").touch()
    job = run(
        WORKERS,
        "survive.py",
        folder,
        f"steps:{SERVER_STEPS}",
        options=["--survive", "--method=backup", f"--snapshot={folder / 'snapshot'}"],
        folder=folder / "job",
        forked="all",
        PACELINE_SNAPSHOT_SECONDS="0.001",
        PAUSE="0.02",
    )
    try:
        if killed_after is not None:
            wait_in(
                job,
                lambda: done_in(folder, 0, 0) >= killed_after,
                "the step to kill at",
            )
            kill(servers_of(job)[0])
        job.wait().check_ended_well()
        assert (killed_after is not None) == ("goes on from its snap" in job.stderr)
        assert set(os.listdir("/dev/shm")) <= memory, "shared memory is left"
        return [torch.load(folder / f"result-{w}") for w in range(WORKERS)]
    finally:
        job.stop()


if __name__ == "__main__":
    main()
