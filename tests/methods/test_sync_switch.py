"""When sync-switch switches, and what of its momentum is left then.

Gradients are all one, so parameters say how many updates there were, and at which part of the
learning rate, whoever came when.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import paceline
from paceline.cluster import Cluster, uniform_cluster
from paceline.errors import UsageError
from paceline.interfaces import PushedGradient
from paceline.methods.sync_switch import BSPThenASP
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.problems import Counting
from tests.support.training import train

RATE, MOMENTUM, SWITCH = 0.25, 0.5, 5


def updates(*phases: tuple[int, float], loses: int | None = 1) -> float:
    """Where so many updates lead, phase by phase, each at a part of the learning rate; in phase
    *loses* the momentum begins with nought."""
    place = velocity = 0.0
    for number, (count, part) in enumerate(phases):
        if number == loses:
            velocity = 0.0
        for _ in range(count):
            velocity = MOMENTUM * velocity + 1.0
            place -= part * RATE * velocity
    return place


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def places(
    method: str,
    where: int | Cluster,
    steps: int,
    seconds: Callable[[int], float] = lambda rank: 0.01 * (1 + 2 * rank),
    **options: Any,
) -> list[float]:
    """Where each worker ends, whose steps take so many *seconds*."""

    def loss(model: torch.nn.Module, rank: int, step: int) -> Any:
        paceline.pace(seconds(rank))
        return model()

    keys = {"make": Counting, "optimizer": sgd, "loss": loss, "reads": False}
    run = train(method, where, steps, **keys | options)
    for one in run:
        torch.testing.assert_close(one.end, one.end[:1].expand_as(one.end))
    return [one.end[0].item() for one in run]


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("switch", [0, 1, SWITCH])
def test_means_first_then_each_gradient_alone(switch: int, servers: int) -> None:
    workers, count = 3, 8
    cluster = uniform_cluster(workers, "1gbit", "50us", servers)
    alone = (count - switch) * workers, 1 / workers
    expected = updates((switch, 1.0), alone, loses=1 if switch else None)
    found = places(f"sync-switch:bsp_steps={switch}", cluster, count)
    assert found == pytest.approx([expected] * workers, 1e-5)


def test_who_is_fast_waits_until_the_switch_and_not_after_it() -> None:
    ended: dict[int, list[float]] = {0: [], 1: []}

    def watch(rank: int, step: int, model: torch.nn.Module, optimizer: Any) -> None:
        ended[rank].append(paceline.now())

    seconds = lambda rank: 100.0 if rank else 1.0  # noqa: E731
    places("sync-switch:bsp_steps=2", 2, 6, seconds, watch=watch)
    fast, slow = ended[0], ended[1]
    assert fast[:2] == pytest.approx(slow[:2], rel=1e-3)
    assert fast[-1] < slow[2]


def test_until_the_switch_bits_are_those_of_backup() -> None:
    assert places("sync-switch:bsp_steps=8", 3, 8) == places("backup", 3, 8)


METHOD = f"sync-switch:bsp_steps={SWITCH}"


@pytest.mark.parametrize("workers", [(3, 3), (3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("saved", [3, SWITCH, 7])
def test_a_job_that_loads_switches_as_one_that_was_never_stopped(
    saved: int, workers: tuple[int, int], tmp_path: Path
) -> None:
    before, after = workers
    folder = tmp_path / "checkpoint"
    places(METHOD, before, saved, save=folder)
    expected = updates(
        (SWITCH, 1.0),
        (max(0, saved - SWITCH) * before, 1 / before),
        ((10 - max(saved, SWITCH)) * after, 1 / after),
    )
    found = places(METHOD, after, 10 - saved, first=saved, load=folder)
    assert found == pytest.approx([expected] * after, 1e-5)


def test_a_job_that_has_switched_never_goes_back(tmp_path: Path) -> None:
    """What was saved in step 3 is loaded after step 7: the rest stays asynchronous."""
    workers, folder = 2, tmp_path / "checkpoint"

    def watch(rank: int, step: int, model: torch.nn.Module, optimizer: Any) -> None:
        if step == 2:
            paceline.save(folder)
        if step == 6:
            paceline.load(folder)

    expected = updates((3, 1.0), (4 * workers, 1 / workers), loses=None)
    found = places(METHOD, workers, 11, watch=watch)
    assert found == pytest.approx([expected] * workers, 1e-5)


@pytest.mark.parametrize("words", [b"x", b"-1", b"1" * 19])
def test_a_report_that_is_no_number_of_steps_is_refused(words: bytes) -> None:
    with pytest.raises(UsageError, match="number of steps"):
        BSPThenASP(3).decode_report(ParameterServer(2).shard, words)


class OneBucket:
    """As much of a shard as the discipline needs."""

    buckets = (0,)

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.answered: list[int] = []

    def next_unstarted_step(self) -> int:
        return 5

    def active_workers(self, step: int) -> list[int]:
        return [0]

    def apply(self, push: PushedGradient) -> None:
        self.applied.append(push.step)

    def reply(self, push: PushedGradient) -> None:
        self.answered.append(push.step)


def test_a_gradient_of_a_step_that_has_ended_without_it_is_applied_alone() -> None:
    """After a load servers may have forgotten that this job had switched before; a worker that
    came back meanwhile is a step behind."""
    discipline, shard = BSPThenASP(9), OneBucket()
    discipline.resume(cast(Any, shard), 4)
    late = PushedGradient(1, 3, 0, 1.0, [True], [], torch.ones(1), 7)
    discipline.on_push(cast(Any, shard), late)
    assert shard.applied == shard.answered == [3]
