"""What is decided, step by step, on all ranks alike: no network, no clock."""

import collections
import random

import pytest

from paceline.bucketing.tuner import WORTH_IT
from paceline.tools.auto import controller
from paceline.tools.auto.controller import typical
from tests.tools.auto.fleet import Runtime


def fixed(**seconds):
    """The same times at all steps."""
    return lambda spec, step: seconds[spec]


def settle(runtime, most=1500):
    """Steps until all ranks have decided, and some more."""
    for number in range(most):
        runtime.step()
        if number > 5 and all(one.steady for one in runtime.controllers):
            return number
    raise AssertionError(f"nothing is settled after {most} steps")


def test_the_fastest_candidate_stays_and_all_ranks_know_it():
    runtime = Runtime(
        3, fixed(bsp=1.0, dear=0.8, osp=0.7), [("osp", 0.7), ("dear", 0.8)], noise=0.01
    )
    settle(runtime)
    assert runtime.specs == ["osp"] * 3
    for log in runtime.logs:
        (one,) = log.decisions
        assert one.chosen == "osp"
        assert one.before == "bsp"
        assert one.planned
        assert [tried.spec for tried in one.trials] == ["osp", "dear"]
        assert [tried.better for tried in one.trials] == [True, False]
        assert one.trials[0].seconds == pytest.approx(0.7, rel=0.02)
        assert one.step_seconds == pytest.approx(0.7, rel=0.02)


def test_a_candidate_that_was_predicted_to_be_fast_and_is_not_is_left():
    runtime = Runtime(2, fixed(bsp=1.0, dear=1.1), [("dear", 0.5)], noise=0.01)
    settle(runtime)
    assert runtime.specs == ["bsp"] * 2
    assert not runtime.logs[0].decisions[0].trials[0].better


@pytest.mark.parametrize("phase", range(4, 8))
def test_what_was_given_up_for_its_cost_is_told_with_its_cost(phase):
    """Its last steps may be fast: those are not what it was given up for."""

    def seconds(spec, step):
        if spec == "bsp":
            return 1.0
        return 0.9 if (runtime.since[spec] + phase) % 8 > 4 else 1.4

    runtime = Runtime(2, seconds, [("dear", 0.5)], settles_after=140)
    runtime.since = collections.Counter()
    step = runtime.measurements[0].step

    def counted(spec, changed):
        runtime.since[spec] += 1
        step(spec, changed)

    runtime.measurements[0].step = counted
    settle(runtime)
    (tried,) = runtime.logs[0].decisions[0].trials
    assert "given up" in tried.why
    assert tried.seconds > tried.before_seconds


def test_where_nothing_waits_nothing_is_measured():
    runtime = Runtime(2, fixed(bsp=1.0, dear=0.5), [("dear", 0.5)], exposed=0.01)
    settle(runtime)
    assert runtime.specs == ["bsp"] * 2
    assert runtime.probes == [[], []]
    assert runtime.logs[0].decisions[0].trials == []
    assert not runtime.logs[0].decisions[0].planned


def test_a_refused_candidate_is_named_and_the_next_one_is_tried():
    runtime = Runtime(
        2,
        fixed(bsp=1.0, dear=0.8, osp=0.1),
        [("osp", 0.1), ("dear", 0.8)],
        refuses=("osp",),
    )
    settle(runtime)
    assert runtime.specs == ["dear"] * 2
    assert "not with this one" in runtime.logs[0].decisions[0].trials[0].why


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_laws_on_random_networks(seed):
    """Ranks decide alike (`Runtime.step` asserts it), it comes to an end, what stays is not slower than
    what ran before by more than noise, and the thousand steps that follow its beginning take
    hardly longer than with what ran before."""
    draw = random.Random(seed)
    specs = ["a", "b"]
    times = {"bsp": 1.0} | {spec: draw.uniform(0.4, 2.5) for spec in specs}
    noise = draw.choice([0.0, 0.005, 0.02])
    runtime = Runtime(
        draw.randint(2, 4),
        lambda spec, step: times[spec],
        [(spec, 0.5) for spec in specs],
        noise=noise,
        change_seconds=draw.uniform(0.0, 1.5),
        settles_after=draw.randint(0, 60),
        seed=seed,
    )
    while len(runtime.history) < 1000:
        runtime.step()
    assert sum(runtime.measurements[0].last(1000)) <= 1000 * (
        1 + controller.SHARE + 0.005
    )
    assert times[runtime.specs[0]] <= 1.0
    while len(runtime.history) < 2500:  # what was put off
        runtime.step()
    best = min(times.values())
    assert times[runtime.specs[0]] <= best / WORTH_IT * (1 + 2 * noise)
    assert set(runtime.history) <= {"bsp", *specs}


def test_the_bound_on_costs_is_what_holds_them():
    """The control of the law above: a trial without bounds costs more."""
    times = {"bsp": 1.0, "a": 1.25}
    bound, controller.SHARE = controller.SHARE, 10.0
    try:
        runtime = Runtime(
            2, lambda spec, step: times[spec], [("a", 0.5)], settles_after=120
        )
        settle(runtime)
    finally:
        controller.SHARE = bound
    assert sum(runtime.measurements[0].last(2000)) - len(runtime.history) > 20


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_out_of_data_stops_all_changes_and_nobody_waits(seed):
    draw = random.Random(seed)
    runtime = Runtime(
        3,
        fixed(bsp=1.0, dear=0.9, osp=0.7),
        [("osp", 0.7), ("dear", 0.9)],
        noise=0.02,
        settles_after=draw.randint(0, 10),
        plan_steps=draw.randint(5, 20),
        seed=seed,
    )
    for _ in range(draw.randint(1, 150)):
        runtime.step()
    leaving = draw.sample(range(3), draw.randint(1, 3))
    for rank in leaving:
        runtime.leave(rank)
        for _ in range(draw.randint(0, 20)):
            changed = runtime.step()
            assert not any(changed.values())
    for _ in range(100):
        assert not any(runtime.step().values())
    for rank in set(range(3)) - runtime.left:
        runtime.leave(rank)
    posted = {len(message) for message in runtime.mail.messages}
    assert posted == {3}, "some ranks have posted more than others"


def test_steps_that_are_slower_for_good_are_decided_anew_and_a_blip_is_not():
    times = {"bsp": 1.0, "dear": 1.2}
    runtime = Runtime(
        2,
        lambda spec, step: times[spec] * (3 if 400 < step < 440 else 1),
        [("dear", 0.5)],
        noise=0.01,
    )
    settle(runtime)
    for _ in range(700):
        runtime.step()
    assert len(runtime.logs[0].decisions) == 1
    times.update(bsp=2.0, dear=1.0)
    for _ in range(1500):
        runtime.step()
    assert runtime.specs == ["dear"] * 2
    assert len(runtime.logs[0].decisions) == 2


def test_a_network_that_changes_all_the_time_is_not_run_after():
    runtime = Runtime(2, lambda spec, step: 2.0 if step // 400 % 2 else 1.0, noise=0.01)
    for _ in range(6000):
        runtime.step()
    assert len(runtime.logs[0].decisions) <= controller.DECISIONS
    assert "stays" in runtime.logs[0].sentences[-1]


def test_looks_get_rarer():
    runtime = Runtime(2, fixed(bsp=1.0), noise=0.01)
    settle(runtime)
    before = len(runtime.mail.messages)
    for _ in range(5000):
        runtime.step()
    assert len(runtime.mail.messages) - before < 15


def test_what_was_decided_before_is_used_at_once_where_it_holds():
    runtime = Runtime(2, fixed(bsp=1.0, dear=0.8), recalled=("dear", 0.81), noise=0.01)
    steps = settle(runtime)
    assert runtime.specs == ["dear"] * 2
    assert runtime.history[3] == "dear"
    assert steps < 60
    assert runtime.logs[0].decisions[0].recalled
    assert runtime.probes == [[], []]


@pytest.mark.parametrize("as_recalled", [True, False])
def test_what_was_decided_before_is_decided_anew_where_it_does_not_hold(as_recalled):
    runtime = Runtime(
        2,
        fixed(bsp=1.0, dear=0.9, osp=0.7),
        [("osp", 0.7)],
        recalled=("dear", 0.3),
        as_recalled=as_recalled,
        noise=0.01,
    )
    settle(runtime)
    assert runtime.specs == ["osp"] * 2
    assert ("dear" in runtime.history) == as_recalled
    assert not runtime.logs[0].decisions[0].recalled


def test_steps_of_milliseconds_put_the_probe_off():
    runtime = Runtime(
        2, lambda spec, step: {"bsp": 0.04, "dear": 0.03}[spec], [("dear", 0.03)]
    )
    for _ in range(1000):
        runtime.step()
    assert runtime.probes == [[], []]
    assert [log.decisions for log in runtime.logs] == [[], []]
    for _ in range(1500):
        runtime.step()
    assert len(runtime.probes[0]) == 1
    assert runtime.specs == ["dear"] * 2


def test_who_waits_for_a_steady_state_looks_at_the_latest_steps_alone():
    runtime = Runtime(2, fixed(bsp=1.0), settles_after=3000)
    for _ in range(1000):
        runtime.step()
    assert 0 < runtime.most_asked <= controller.LOOK_EVERY


def test_what_is_put_off_is_said_and_tried_later():
    runtime = Runtime(
        2,
        fixed(bsp=1.0, dear=0.5, osp=0.4),
        [("osp", 0.4), ("dear", 0.5)],
        change_seconds=4.0,
    )
    settle(runtime)
    for log in runtime.logs:
        assert [one.spec for one in log.decisions[0].trials] == ["osp"]
        assert log.decisions[0].chosen == "osp"
    while len(runtime.logs[0].decisions) < 2:
        runtime.step()
    assert [one.spec for one in runtime.logs[0].decisions[1].trials] == ["osp", "dear"]
    assert not runtime.logs[0].decisions[1].postponed


def test_periods_are_measured_whole():
    assert typical([1.0, 1.0, 4.0, 1.0, 1.0, 4.0], 3) == (2.0, 0.0)
    assert typical([1.0, 1.0, 4.0], 3) == (2.0, 0.05)
    assert typical([1.0, 2.0, 3.0], 1) == (2.0, 1.0)
    assert typical([2.0, 1.9, 2.1, 2.0, 9.0, 2.0, 2.0, 0.1], 1) == (2.0, 0.0)
