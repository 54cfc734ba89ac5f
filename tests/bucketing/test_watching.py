"""What has changed for good is measured again; what comes and goes is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.bucketing import tuner
from paceline.bucketing.tuner import PROFILED_STEPS, TRIAL_STEPS
from paceline.runtimes.simulated import Simulation
from tests.bucketing.cases import Watched, batch, ended, note, sgd
from tests.bucketing.test_phases import Crossed
from tests.support.simulations import cluster, rack, run_on, simulation

EVERY, WATCHED = 12, 4
SETTLED = 1 + PROFILED_STEPS + 2 * TRIAL_STEPS
"""Backward passes until the plan is chosen, where times are exact."""

AGAIN = (
    "paceline: bucketing: the order of gradients or the time of a step has changed: "
    "measuring again"
)
SLOW = cluster(rack(2, link=1.25e6))


@pytest.fixture(autouse=True)
def _watch_more_often(monkeypatch):
    monkeypatch.setattr(tuner.watch, "every", EVERY)
    monkeypatch.setattr(tuner.watch, "steps", WATCHED)


def train(
    seconds: Callable[[int], float],
    order: Callable[[int], str],
    steps: int = 110,
    before: Callable[[Simulation, int], None] = lambda runtime, step: None,
) -> Watched:
    """Steps that compute for *seconds* of the step's number, on both ranks."""
    runtime = simulation(SLOW)

    def body(rank: int) -> Watched:
        model = Crossed()
        optimizer = sgd(model)
        watched = Watched()
        for step in range(steps):
            before(runtime, step)
            optimizer.zero_grad()
            model.seconds = seconds(step) / 3
            model(batch(rank, step), order(step)).backward()
            optimizer.step()
            note(watched, model, optimizer)
        return ended(watched, optimizer)

    first, second = run_on(runtime, body)
    assert first.groups == second.groups
    assert torch.equal(first.parameters[-1], second.parameters[-1])
    return first


def test_what_does_not_change_is_measured_once(capsys):
    watched = train(lambda step: 0.1, lambda step: "abc")
    assert AGAIN not in capsys.readouterr().err
    assert len({tuple(groups) for groups in watched.groups[SETTLED:]}) == 1
    assert len(set(watched.bytes_sent[SETTLED + EVERY + 1 :: EVERY])) == 1


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_step_that_takes_another_time_for_good_is_measured_again_once(factor, capsys):
    watched = train(
        lambda step: 0.1 * (factor if step >= 30 else 1), lambda step: "abc"
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(AGAIN) == 1
    # measured again: settled after two strange windows, and then for good
    assert 30 + EVERY < watched.settled_after <= 30 + 3 * EVERY + SETTLED
    assert len(lines) == 3  # a trial, the change, and a trial again


def test_a_network_that_slows_down_for_good_is_measured_again_once(capsys):
    def slow_down(runtime: Simulation, step: int) -> None:
        if step == 30:
            for link in range(len(runtime.cluster.capacities)):
                runtime.links.set_capacity(link, 0.2 * runtime.cluster.capacities[link])

    train(lambda step: 0.01, lambda step: "abc", before=slow_down)
    assert capsys.readouterr().err.splitlines().count(AGAIN) == 1


def test_an_order_that_flips_for_good_is_measured_again_once(capsys):
    watched = train(lambda step: 0.1, lambda step: "abc" if step < 30 else "bca")
    assert capsys.readouterr().err.splitlines().count(AGAIN) == 1
    assert [name for group in watched.plan for name in group] == ["b", "c", "a"]


def window(number: int) -> range:
    """The steps, counted from 0, that are watched in a window after the plan's choice."""
    end = SETTLED + (number + 1) * EVERY
    return range(end - WATCHED, end)


@pytest.mark.parametrize("what", ["time", "order"])
def test_what_lasts_for_one_window_at_a_time_is_left_alone(what, capsys):
    odd = [*window(2), *window(4)]
    watched = train(
        lambda step: 0.3 if what == "time" and step in odd else 0.1,
        lambda step: "bca" if what == "order" and step in odd else "abc",
    )
    assert AGAIN not in capsys.readouterr().err
    assert watched.settled_after == SETTLED


@pytest.mark.parametrize("what", ["time", "order"])
def test_two_windows_in_a_row_are_a_change(what, capsys):
    """The same, but the next window too: so the last test did hit its window."""
    odd = [*window(2), *window(3)]
    train(
        lambda step: 0.3 if what == "time" and step in odd else 0.1,
        lambda step: "bca" if what == "order" and step in odd else "abc",
    )
    assert AGAIN in capsys.readouterr().err
