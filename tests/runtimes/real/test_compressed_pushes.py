"""Codes between real processes: the bits of virtual time, and jobs that survive."""

import ast
import runpy

import pytest
import torch

import paceline
from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from tests.runtimes.real.test_survive import WORKERS, check_kills, start
from tests.support import forked
from tests.support.lives import START_SECONDS, servers_of, wait_for_steps
from tests.support.processes import SCRIPTS, kill

__all__ = ["start"]

CODES = "compression=top-k,compression.density=0.1,compression.small=0"
SCRIPT = SCRIPTS / "compressible_pushes.py"


@pytest.mark.slow
@pytest.mark.parametrize("replies", ["full", "deltas"])
def test_processes_end_with_the_bits_of_virtual_time(replies):
    method = f"backup:{CODES},replies={replies},buffers=local"
    ends = {}

    def body(rank):
        paceline.init()
        ends[rank] = runpy.run_path(str(SCRIPT))["train"](method)

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(body)
    assert ends[0] == ends[1]
    for said in forked.run_together(2, [SCRIPT, method]):
        assert ast.literal_eval(said.stdout) == ends[0]


SURVIVES = f"asp:{CODES},replies=deltas"


@pytest.mark.slow
def test_workers_that_come_back_begin_with_all_of_it(start):
    check_kills(start, SURVIVES, kills=4, forked="all")


@pytest.mark.slow
def test_a_server_that_comes_back_has_no_copies(start, tmp_path):
    """All pull anew, and go on with differences from that."""
    path = tmp_path / "snapshot"
    job, folder = start(
        SURVIVES,
        "steps:40",
        options=[f"--snapshot={path}"],
        forked="all",
        PACELINE_SNAPSHOT_SECONDS="0.001",
    )
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 20)
    assert path.exists()
    kill(servers_of(job)[0])
    (folder / "go").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert "it goes on from its snapshot of step" in job.stderr
    results = [torch.load(folder / f"result-{rank}") for rank in range(WORKERS)]
    assert all(torch.equal(result, results[0]) for result in results)
