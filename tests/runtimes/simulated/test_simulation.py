"""Whose words are shown of what simulated workers print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import paceline
from paceline.cluster import uniform_cluster
from paceline.collectives.communicator import Communicator
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from tests.support.simulations import cluster, rack, run


def printed(
    body: Callable[[int], Any], capsys: pytest.CaptureFixture[str], output: Any
) -> tuple[list[str], list[str]]:
    """Lines on standard output and on standard error."""

    def main(rank: int) -> None:
        paceline.init()
        body(rank)

    before = sys.stdout, sys.stderr
    Simulation(uniform_cluster(3, "1gbit", "50us"), output=output).run(main)
    assert (sys.stdout, sys.stderr) == before
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


def speaks(rank: int) -> None:
    print("I am", end=" ")
    dist.barrier()
    print(rank)
    print("trouble", file=sys.stderr)
    print(f"\r{rank} %\r100 %", end="")


def test_the_first_workers_words_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = printed(speaks, capsys, "first")
    assert out == ["I am 0", "", "0 %", "100 %"]  # as a terminal's lines: \r ends one
    assert sorted(err) == ["[1] trouble", "[2] trouble", "trouble"]


def test_all_words_are_whole_lines_with_their_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = printed(speaks, capsys, "all")
    said = [f"[{rank}] I am {rank}" for rank in range(3)]
    assert sorted(out) == sorted([*said, *(f"[{rank}] 100 %" for rank in range(3))])
    assert sorted(err) == ["[1] trouble", "[2] trouble", "trouble"]


def test_by_default_nothing_is_done_to_anybodys_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = printed(lambda rank: print("hello"), capsys, None)
    assert out == ["hello"] * 3
    assert err == []


def test_streams_are_still_files(capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        assert sys.stdout.isatty() is False
        assert sys.stdout.encoding
        sys.stdout.writelines(["one\n", "two\n"])
        sys.stdout.flush()

    assert printed(body, capsys, "first")[0] == ["one", "two"]


def test_a_stream_that_outlives_the_simulation_still_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A logging handler keeps the one that it found."""
    kept = []
    printed(lambda rank: kept.append(sys.stderr), capsys, "first")
    print("after", file=kept[1])
    assert capsys.readouterr().err == "after\n"


# ---- what a worker knows of the network that it is on ----


def test_workers_know_the_cluster_that_is_simulated() -> None:
    described = cluster(rack(2), rack(3, speed=(1.0, 0.5, 1.0)))

    def body(rank: int) -> list[int]:
        runtime = join_runtime()
        assert runtime.cluster is described
        comm = Communicator(runtime)
        assert (
            comm.placement.racks is not None
        )  # also where averages are formed natively
        assert list(comm.placement.racks) == [0, 0, 1, 1, 1]
        some = [0, 3, 4] if rank in (0, 3, 4) else [1, 2]
        return list(comm.group(some).placement.racks or [])

    assert run(described, body) == [[0, 1, 1], [0, 1], [0, 1], [0, 1, 1], [0, 1, 1]]
