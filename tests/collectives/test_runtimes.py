"""The laws of a `Comm` in virtual time, and on three real processes in one job."""

from pathlib import Path

import pytest

from paceline.runtimes.processes import PEER_LOST_MARKERS
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
        assert any(words in end.stderr for words in PEER_LOST_MARKERS), end.stderr
