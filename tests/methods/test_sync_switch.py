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
from paceline.core.settings import parse_method
from paceline.errors import UsageError
from paceline.interfaces import PushedGradient
from paceline.methods.sync_switch import BSPThenASP
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.problems import Counting, flat_parameters
from tests.support.training import simulate

RATE, MOMENTUM, SWITCH = 0.25, 0.5, 5


def updates(*phases: tuple[int, float], zeroed: bool) -> float:
    """Where so many updates lead, phase by phase, each at a part of the learning rate."""
    place = velocity = 0.0
    for number, (count, part) in enumerate(phases):
        if number and zeroed:
            velocity = 0.0
        for _ in range(count):
            velocity = MOMENTUM * velocity + 1.0
            place -= part * RATE * velocity
    return place


def job(workers: int, script: Callable[[int], float], servers: int = 0) -> list[float]:
    """What the script gives on each worker."""
    ends: dict[int, float] = {}

    def train(rank: int) -> None:
        ends[rank] = script(rank)

    simulate(workers, train, servers)
    return [ends[rank] for rank in range(workers)]


def begin(method: str) -> tuple[Counting, paceline.DistributedOptimizer]:
    model = Counting()
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return model, paceline.distribute(model, inner, method=method, buckets="wfbp")


def steps(
    model: Counting, optimizer: torch.optim.Optimizer, count: int, seconds: float
) -> None:
    for _ in range(count):
        paceline.pace(seconds)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def place_of(model: Counting) -> float:
    everywhere = flat_parameters(model)
    torch.testing.assert_close(everywhere, everywhere[:1].expand_as(everywhere))
    return everywhere[0].item()


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("switch", [0, 1, SWITCH])
def test_means_first_then_each_gradient_alone(switch: int, servers: int) -> None:
    workers, count = 3, 8

    def script(rank: int) -> float:
        model, optimizer = begin(f"sync-switch:bsp_steps={switch}")
        steps(model, optimizer, count, 0.01 * (1 + 2 * rank))
        optimizer.finish()
        return place_of(model)

    expected = updates(
        (switch, 1.0),
        ((count - switch) * workers, 1 / workers),
        zeroed=switch > 0,
    )
    assert job(workers, script, servers) == pytest.approx([expected] * workers, 1e-5)


def test_who_is_fast_waits_until_the_switch_and_not_after_it() -> None:
    ended: dict[int, list[float]] = {0: [], 1: []}

    def script(rank: int) -> float:
        model, optimizer = begin("sync-switch:bsp_steps=2")
        for _ in range(6):
            steps(model, optimizer, 1, 100.0 if rank else 1.0)
            ended[rank].append(paceline.now())
        optimizer.finish()
        return place_of(model)

    job(2, script)
    fast, slow = ended[0], ended[1]
    assert fast[:2] == pytest.approx(slow[:2], rel=1e-3)
    assert fast[-1] < slow[2]


def test_until_the_switch_bits_are_those_of_backup() -> None:
    ends = []
    for method in ("backup", "sync-switch:bsp_steps=8"):

        def script(rank: int, method: str = method) -> float:
            model, optimizer = begin(method)
            steps(model, optimizer, 8, 0.01)
            optimizer.finish()
            return place_of(model)

        ends.append(job(3, script))
    assert ends[0] == ends[1]


METHOD = f"sync-switch:bsp_steps={SWITCH}"


def saved_after(folder: Path, count: int, workers: int) -> None:
    def script(rank: int) -> float:
        model, optimizer = begin(METHOD)
        steps(model, optimizer, count, 0.01 * (1 + rank))
        paceline.save(folder)
        optimizer.finish()
        return 0.0

    job(workers, script)


@pytest.mark.parametrize("workers", [(3, 3), (3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("saved", [3, SWITCH, 7])
def test_a_job_that_loads_switches_as_one_that_was_never_stopped(
    saved: int, workers: tuple[int, int], tmp_path: Path
) -> None:
    before, after = workers
    saved_after(tmp_path / "checkpoint", saved, before)

    def script(rank: int) -> float:
        model, optimizer = begin(METHOD)
        paceline.load(tmp_path / "checkpoint")
        steps(model, optimizer, 10 - saved, 0.01 * (1 + rank))
        optimizer.finish()
        return place_of(model)

    alone = [(max(0, saved - SWITCH) * before, 1 / before)]
    alone += [((10 - max(saved, SWITCH)) * after, 1 / after)]
    place, velocity = 0.0, 0.0
    for number, (count, part) in enumerate([(SWITCH, 1.0), *alone]):
        velocity = 0.0 if number == 1 else velocity
        for _ in range(count):
            velocity = MOMENTUM * velocity + 1.0
            place -= part * RATE * velocity
    assert job(after, script) == pytest.approx([place] * after, 1e-5)


def test_a_job_that_has_switched_never_goes_back(tmp_path: Path) -> None:
    """What was saved in step 3 is loaded after step 7: the rest stays asynchronous."""
    workers, momentum_of_three = 2, sum(MOMENTUM**n for n in range(3))

    def script(rank: int) -> float:
        model, optimizer = begin(METHOD)
        steps(model, optimizer, 3, 0.01)
        paceline.save(tmp_path / "checkpoint")
        steps(model, optimizer, 4, 0.01)
        paceline.load(tmp_path / "checkpoint")
        steps(model, optimizer, 4, 0.01 * (1 + rank))
        optimizer.finish()
        return place_of(model)

    place, velocity = updates((3, 1.0), zeroed=False), momentum_of_three
    for _ in range(4 * workers):
        velocity = MOMENTUM * velocity + 1.0
        place -= RATE / workers * velocity
    assert job(workers, script) == pytest.approx([place] * workers, 1e-5)


def test_fewer_steps_than_none_are_refused() -> None:
    with pytest.raises(UsageError, match="0 or more steps"):
        parse_method("sync-switch:bsp_steps=-1")


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
