"""The laws of a `Comm` in virtual time, and on three real processes in one job."""

from pathlib import Path

import pytest
import torch

from paceline.collectives.communicator import TorchComm
from paceline.collectives.nccl_stages import Stages
from paceline.collectives.placement import Places
from paceline.runtimes.join import join_world
from paceline.runtimes.real.exit import LOST_PEER
from tests.collectives.cases import CASES, run_case
from tests.support.forked import run_together, together
from tests.support.simulations import run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
@pytest.mark.parametrize("name", CASES)
def test_law_in_virtual_time(name, play):
    run(3, lambda rank: run_case(name), play=play)


@pytest.mark.slow
def test_every_law_on_three_processes():
    ends = run_together(3, ["-m", "tests.collectives.all_cases"], folder=ROOT)
    for rank, end in enumerate(ends):
        said = set(end.stdout.splitlines())
        assert said >= {f"rank {rank} {name}: ok" for name in CASES}, end.stdout
        assert f"rank {rank} leaves nothing" in said


def test_a_rank_that_dies_in_a_work_ends_the_job():
    ranks = together(3, ["-m", "tests.collectives.dies_in_a_work"], folder=ROOT)
    try:
        ends = [rank.done() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ends[2].returncode == 3
    for end in ends[:2]:
        assert end.returncode not in (0, 3), end.stdout + end.stderr
        assert any(words in end.stderr for words in LOST_PEER), end.stderr


@pytest.mark.parametrize("racks", [(0, 1, 0, 1), (5, 5, 5, 5)])
def test_three_stages_by_groups_in_racks_of_one_size(racks):
    """Parts have one length: what is no multiple of it is padded."""

    def body(rank: int) -> None:
        world = join_world()
        comm = TorchComm(world, "even", places=Places(racks, None, (0, 1, 2, 3)))
        stages = Stages(comm)
        for size in (1, 3, 4, 1001):
            held = torch.arange(size) * 10**rank
            stages.all_reduce(held, "sum").wait()
            assert torch.equal(held, torch.arange(size) * 1111)
            most = torch.full((size,), float(rank))
            stages.all_reduce(most, "max").wait()
            assert torch.equal(most, torch.full((size,), 3.0))

    run(4, body)
