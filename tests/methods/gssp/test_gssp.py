"""Whole trainings in virtual time whose workers change groups.

Gradients are all one, so parameters say how many gradients are in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.testing.problems import Counting
from tests.support.training import train

RATE = 0.25
Seconds = Callable[[int, float], float]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def job(
    workers: int,
    method: str,
    seconds: Seconds,
    counts: list[int],
    save: tuple[int, Path] | None = None,
) -> tuple[torch.Tensor, list[float], list[str]]:
    """How many steps of all are in the parameters at the end, element by element; when each ended; and
    what was said. *seconds* of a step by rank and moment; *save* after so many own steps."""
    ends: dict[int, float] = {}

    def loss(model: torch.nn.Module, rank: int, step: int) -> Any:
        if save is not None and step == save[0]:
            paceline.save(save[1])
        paceline.pace(seconds(rank, paceline.now()))
        return model()

    def watch(rank: int, step: int, model: torch.nn.Module, optimizer: Any) -> None:
        ends[rank] = paceline.now()

    keys = {"make": Counting, "optimizer": sgd, "reads": False}
    run = train(method, workers, counts, loss=loss, watch=watch, **keys)
    for one in run:
        assert torch.equal(one.end, run[0].end), "they end with different models"
    return -run[0].end / RATE, [ends[rank] for rank in range(workers)], run[0].notes


def test_groups_are_found_and_every_gradient_is_in_every_model() -> None:
    counts = [36, 12, 36, 12]
    steps, ends, notes = job(
        4, "gssp:measure_steps=3", lambda rank, _: (1.0, 3.0)[rank % 2], counts
    )
    assert steps == pytest.approx(torch.full_like(steps, sum(counts) / 4))
    # Three steps at the slowest one's pace, and those of ssp's bound; then nobody waits.
    assert max(ends) < 36 + 3 * 3
    assert notes == []


def test_schedules_by_samples_are_at_the_same_rate_everywhere(tmp_path: Path) -> None:
    """Also where servers come into use later, and in a job that loads what another has saved."""

    def play(**files: Path) -> list[list[tuple[float, float]]]:
        """By rank: moments, and how many steps of all were done then."""
        seen: list[list[tuple[float, float]]] = [[], []]
        schedules: dict[int, Any] = {}

        def prepare(optimizer: Any) -> Callable[[], None]:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
            schedules[paceline.rank()] = schedule
            return lambda: None

        def loss(model: torch.nn.Module, rank: int, step: int) -> Any:
            paceline.pace((1.0, 3.0)[rank])
            return model()

        def watch(rank: int, step: int, model: torch.nn.Module, optimizer: Any) -> None:
            seen[rank].append((paceline.now(), optimizer.steps_of_all))
            while schedules[rank].last_epoch < int(optimizer.steps_of_all):
                schedules[rank].step()

        keys: dict[str, Any] = {"make": Counting, "optimizer": sgd, "reads": False}
        keys |= {"loss": loss, "watch": watch, "prepare": prepare, **files}
        train("gssp:measure_steps=3", 2, (30, 10), **keys)
        return seen

    # Both have seen about as much at the same time, however many steps each has done.
    fast, slow = play(save=tmp_path / "saved")
    for now, steps in slow[4:]:
        there = max(s for at, s in fast if at <= now + 1e-3)
        assert abs(steps - there) <= 2
    assert fast[-1][1] == pytest.approx(20, abs=2)
    fast, _ = play(load=tmp_path / "saved")
    assert fast[0][1] == pytest.approx(21, abs=2)
    assert fast[-1][1] == pytest.approx(40, abs=3)


def test_where_nobody_is_slower_it_says_that_it_is_ssp() -> None:
    _, _, notes = job(3, "gssp:measure_steps=3", lambda rank, _: 1.0, [8] * 3)
    (note,) = notes
    assert "one group, for which this is ssp" in note


def test_who_has_become_as_fast_is_in_one_group_again_and_it_is_said() -> None:
    method = "gssp:measure_steps=5"
    steps, _, notes = job(
        3, method, lambda rank, now: 2.0 if rank == 2 and now < 30 else 1.0, [60] * 3
    )
    assert steps == pytest.approx(torch.full_like(steps, 60), rel=1e-5)
    (note,) = notes
    assert "fast again" in note
    assert "one group" in note


def test_all_meet_though_who_has_changed_groups_is_far_ahead(tmp_path: Path) -> None:
    """Worker 0 becomes slow, and joins a group that has done a third of its steps. It is the first
    of it where all save after their 60th step: they get there, too."""

    def seconds(rank: int, now: float) -> float:
        return 3.0 if rank > 1 or (rank == 0 and now > 40) else 1.0

    method = "gssp:measure_steps=3,staleness=2"
    steps, ends, _ = job(4, method, seconds, [66] * 4, (60, tmp_path / "saved"))
    assert steps == pytest.approx(torch.full_like(steps, 66))
    assert min(ends) > 60 * 3  # they have met
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "method",
    [
        "gssp:measure_steps=3,staleness=0,period=1",
        "gssp:measure_steps=2,number_of_groups=2,compression=gd-top-k,"
        "compression.small=0,replies=deltas",
        "grouping-sgd:members=0.2+1.3",
    ],
)
def test_trainings_end_with_one_model(method: str) -> None:
    job(4, method, lambda rank, _: (1.0, 3.0)[rank % 2], [30, 10, 30, 10])
