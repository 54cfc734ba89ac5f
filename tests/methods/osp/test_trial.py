"""A trial of deferring ends where it does not pay, in the same step everywhere.

In virtual time nothing but the network is shared. Where processors carry the messages a
script computes for longer while something is deferred: it paces itself so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.methods.osp import OSP
from paceline.methods.osp.deferral import Parts, Rate
from paceline.methods.osp.deferral_policy import LONGER, LOOK, PATIENCE, Seen, Trial
from paceline.methods.osp.measurement import StepWatch
from paceline.methods.osp.reports import Measured, read_mask
from paceline.runtimes.simulated import Simulation
from paceline.testing import inspect
from tests.methods.osp.helpers import decide_often
from tests.methods.osp.test_adapting import COMPUTE, layers, link_for
from tests.methods.osp.test_laws import OtherWayRound
from tests.methods.osp.test_two_stages import UNITS, Talk
from tests.support.tables import crossed
from tests.support.training import train_to_one_model

INTERVAL = OSP.interval
NATIVE = "osp:collective=native,budget=constant,most=1"
SERVER = "osp:budget=constant,most=1"
WORKLOAD = layers(4, 2**17)

NATIVE_TRIAL = set(range(INTERVAL + 1, INTERVAL + 1 + LOOK + 2))
"""After these steps something is deferred: the decision of step 20 holds after step 21, that
of step 27 has seen steps 23 to 27, and holds after step 28."""

SERVER_TRIAL = set(range(INTERVAL + 1, INTERVAL + 1 + LOOK + 3))
"""What workers have seen they tell in the step after that."""

AGAIN = PATIENCE * INTERVAL
"""So many steps later a trial that has failed is repeated."""

Mask = tuple[object, ...]


def train(
    method: str,
    steps: int | Sequence[int],
    slower: Callable[[int, int], float],
    workers: int = 2,
    servers: int = 0,
    buckets: str = "wfbp",
) -> tuple[list[dict[int, Mask]], list[list[float]]]:
    """Per rank, what is deferred after each step, where something is; and the times of steps.
    A rank computes *slower* (rank, step) times as long while something is deferred. The
    network takes about as long as computing."""
    deferred: list[dict[int, Mask]] = [{} for _ in range(workers)]
    times: list[list[float]] = [[] for _ in range(workers)]

    def body(rank: int) -> None:
        paceline.init()
        model = paceline.stand_in(WORKLOAD)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, sgd, method=method, buckets=buckets)
        mask: Mask = ()
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            start = paceline.now()
            optimizer.zero_grad()
            paceline.pace(COMPUTE * (slower(rank, step) if mask else 1.0))
            model(torch.ones(1)).backward()
            optimizer.step()
            mask = mask_of(optimizer)
            if mask:
                deferred[rank][step] = mask
            times[rank].append(paceline.now() - start)
        optimizer.finish()

    rack = Rack(workers=workers, link=link_for(1.0, WORKLOAD, 2), latency=5e-6)
    Simulation(Cluster((rack,), servers=(ServerHost(),) * servers)).run(body)
    return deferred, times


def mask_of(optimizer: paceline.DistributedOptimizer) -> Mask:
    return tuple(inspect(optimizer).worker.layout.deferred)


def by(factor: float) -> Callable[[int, int], float]:
    return lambda rank, step: factor


def assert_one_mask(deferred: Sequence[dict[int, Mask]], steps: Sequence[int]) -> None:
    """Whoever trains in a step defers what the others do."""
    for one in range(len(steps)):
        for other in range(one):
            both = range(min(steps[one], steps[other]))
            here = [deferred[one].get(step) for step in both]
            assert here == [deferred[other].get(step) for step in both]


# ---- small runs ----


@pytest.mark.parametrize(
    ("of", "workers"),
    crossed(
        2,
        [
            (NATIVE, 0, NATIVE_TRIAL),
            (f"{NATIVE},overlap=false", 0, NATIVE_TRIAL),
            (SERVER, 1, SERVER_TRIAL),
            (SERVER, 2, SERVER_TRIAL),
            (f"{SERVER},servers=per-node", 0, SERVER_TRIAL),
        ],
        [2, 3],
    ),
)
def test_a_trial_that_makes_steps_much_longer_ends_soon(
    of: tuple[str, int, set[int]], workers: int
) -> None:
    method, servers, trial = of
    steps = 3 * INTERVAL
    masks, times = train(method, steps, by(4.0), workers, servers)
    for mask in masks:
        assert set(mask) == trial
    before, after = times[0][INTERVAL], times[0][-1]
    assert after == pytest.approx(before, rel=0.01)  # it is as without


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "servers", "trial"), [(NATIVE, 0, NATIVE_TRIAL), (SERVER, 1, SERVER_TRIAL)]
)  # fmt: skip
def test_what_has_failed_is_tried_again_and_then_rests_for_longer(
    method: str, servers: int, trial: set[int]
) -> None:
    (mask, _), _ = train(method, AGAIN + 4 * INTERVAL, by(4.0), 2, servers)
    assert set(mask) == trial | {step + AGAIN for step in trial}


@pytest.mark.parametrize(("method", "servers"), [(NATIVE, 0), (SERVER, 1)])
def test_a_trial_that_pays_goes_on(method: str, servers: int) -> None:
    steps = 5 * INTERVAL
    (mask, _), (times, _) = train(method, steps, by(1.0), 2, servers)
    assert set(mask) == set(range(INTERVAL + 1, steps))
    assert times[-1] < 0.8 * times[INTERVAL]


@pytest.mark.parametrize(("method", "servers"), [(NATIVE, 0), (SERVER, 1)])
def test_a_trial_that_gains_nothing_ends_with_its_interval(
    method: str, servers: int
) -> None:
    """Computing takes longer by what the network takes no longer."""
    _, (plain, _) = train(method, INTERVAL, by(1.0), 2, servers)
    _, (hidden, _) = train(method, 3 * INTERVAL, by(1.0), 2, servers)
    factor = 1 + (plain[-1] - hidden[-1]) * 1.1 / COMPUTE
    (mask, _), (times, _) = train(method, 3 * INTERVAL, by(factor), 2, servers)
    assert set(mask) == set(range(INTERVAL + 1, 2 * INTERVAL + 1))
    assert plain[-1] < times[2 * INTERVAL - 1] < LONGER * plain[-1]


@pytest.mark.parametrize(("method", "servers"), [(NATIVE, 0), (SERVER, 1)])
def test_some_steps_that_are_no_steps_like_the_others_end_no_trial(
    method: str, servers: int
) -> None:
    odd = {INTERVAL + 4: 30.0, INTERVAL + 6: 30.0}
    (mask, _), _ = train(
        method, 2 * INTERVAL, lambda rank, step: odd.get(step, 1.0), 2, servers
    )
    assert set(mask) == set(range(INTERVAL + 1, 2 * INTERVAL))


# ---- uneven data: a step in which one rank decides and another does not is a hang ----

ENDS = [
    *range(INTERVAL, INTERVAL + 4),
    *range(INTERVAL + LOOK + 1, INTERVAL + LOOK + 6),
]
"""Around all that ranks do together: decisions, and the steps after which they hold."""


@pytest.mark.slow
@pytest.mark.parametrize(("short", "end"), crossed(2, [0, 1], ENDS))
def test_a_rank_runs_out_of_data_around_a_trial(short: int, end: int) -> None:
    """Rank 0 is who decides; who then does has seen no step yet as the one who decides, and
    finds out anew what steps take without."""
    steps = [3 * INTERVAL] * 3
    steps[short] = end
    masks, _ = train(NATIVE, steps, by(4.0), 3)
    assert_one_mask(masks, steps)
    last = masks[(short + 1) % 3]
    assert set(last) <= set(range(INTERVAL + 1, 3 * INTERVAL))
    assert end < INTERVAL or set(last) >= NATIVE_TRIAL
    assert not set(last).intersection(range(2 * INTERVAL + 1, 3 * INTERVAL))


@pytest.mark.parametrize(
    ("buckets", "steps"),
    crossed(
        2,
        ["ddp", "optimal"],
        [(0, 33, 45), (33, 0, 45), (24, 27, 28), (28, 27, 24), (27, 0, 28)],
    ),
)
def test_ranks_run_out_of_data_one_after_the_other(
    steps: tuple[int, ...], buckets: str
) -> None:
    for factor in (1.0, 4.0):
        masks, _ = train(NATIVE, steps, by(factor), 3, buckets=buckets)
        assert_one_mask(masks, steps)


@pytest.mark.parametrize("steps", [(3, 0, 3), (0, 3, 3), (3, 3, 0)], ids=str)
def test_decisions_fit_while_buckets_change(
    steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without data is through with a step before the planner makes new buckets, the
    others after. Here something is decided after every step."""
    decide_often(monkeypatch, 1)
    method = "osp:collective=native,budget=constant,most=1"
    train_to_one_model(method, 3, make=OtherWayRound, buckets="ddp", steps=steps)


@pytest.mark.parametrize(
    ("method", "end"),
    crossed(
        2,
        [SERVER, f"{SERVER},servers=per-node"],
        [INTERVAL + 3, INTERVAL + LOOK + 3],
    ),
)
def test_over_servers_too(method: str, end: int) -> None:
    steps = (3 * INTERVAL, end, 3 * INTERVAL)
    servers = 0 if "per-node" in method else 2
    masks, _ = train(method, steps, by(4.0), 3, servers)
    assert_one_mask(masks, steps)
    assert set(masks[0]) >= set(range(INTERVAL + 1, end))


# ---- the judgement ----


def seen(
    whole: float, per_byte: float = 1e-9, workers: tuple[int, ...] = (0, 1)
) -> Seen:
    return Seen(None, Rate(0.0, per_byte), whole, workers)


PLAIN = seen(1.0)


def begun() -> Trial:
    trial = Trial()
    assert not trial.rests(False, PLAIN)
    return trial


@pytest.mark.parametrize(
    ("trial", "early", "late"),
    [
        (seen(0.8), False, False),
        (seen(0.995), False, True),  # no shorter
        (seen(1.09), False, True),
        (seen(1.11), True, True),
        (seen(0.0), False, False),  # too few steps to tell
        (seen(1.5, per_byte=2.1e-9), True, False),  # the network has changed
        (seen(1.5, per_byte=0.49e-9), True, False),
        (seen(1.05, per_byte=2.1e-9), False, False),
        (seen(1.5, workers=(0,)), False, True),  # other workers: found out anew
        (seen(0.5, workers=(0,)), False, True),
    ],
)
def test_what_a_trial_shows(trial: Seen, early: bool, late: bool) -> None:
    assert begun().stops_early(True, trial) is early
    assert begun().rests(True, trial) is late


def test_steps_that_are_too_few_begin_no_trial() -> None:
    trial = Trial()
    assert trial.rests(False, seen(0.0))
    assert not trial.stops_early(True, seen(9.0))
    assert not trial.rests(False, PLAIN)
    assert not trial.rests(False, seen(0.0))  # known from before
    assert trial.stops_early(True, seen(9.0))


def test_it_is_looked_at_early_only_in_its_first_interval() -> None:
    trial = begun()
    assert not trial.stops_early(False, seen(9.0))
    assert not trial.rests(True, seen(0.8))
    assert not trial.stops_early(True, seen(9.0))
    assert trial.rests(True, seen(9.0))


def test_each_rest_is_twice_as_long_as_the_one_before() -> None:
    trial, rests = begun(), []
    for early in (True, False, True):
        assert (
            trial.stops_early(True, seen(2.0))
            if early
            else trial.rests(True, seen(2.0))
        )
        count = 1
        while trial.rests(False, PLAIN):
            count += 1
        rests.append(count)
    assert rests == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE]


def test_a_network_that_seems_to_be_another_is_no_failure() -> None:
    """Steps that are longer because processors are busy say so as well."""
    trial = begun()
    assert trial.stops_early(True, seen(2.0, per_byte=3e-9))
    assert not trial.rests(False, PLAIN)
    assert trial.stops_early(True, seen(2.0, per_byte=1e-9))
    assert trial.rests(False, PLAIN)


def test_other_workers_are_no_failure() -> None:
    trial = begun()
    assert trial.rests(True, seen(0.8, workers=(1,)))
    assert not trial.rests(False, seen(0.9, workers=(1,)))


class Counting:
    """A stopwatch whose marks are the moments given."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, marks: Sequence[float]) -> list[float]:
        return [mark - start for mark in marks]


def test_a_step_takes_as_long_as_half_of_them_do() -> None:
    clock = Counting()
    run: Any = SimpleNamespace(stopwatch=clock, report=print)
    watch = StepWatch(OSP(), run)

    def whole() -> float:
        parts = Parts([0], [0], 1)
        return watch.measured(watch.times(), parts, [], 1.0).whole

    def steps(*lengths: float, layout: int) -> None:
        for length in lengths:
            watch.step_begins()
            watch.bucket_ready()
            watch.mark()
            watch.mark()
            clock.now += length
            watch.step_ended(layout, None)

    steps(*[1.0] * (1 + LOOK), layout=0)
    assert whole() == 1.0
    steps(9.0, layout=1)  # which belongs to neither
    for _ in range(LOOK):
        assert whole() == 0.0
        steps(2.0, layout=1)
    assert whole() == 2.0


# ---- a server alone ----


def told(whole: float, **others: object) -> Measured:
    """For one computation of 0.3 s each bucket takes 0.48 s: to defer one would pay."""
    known = {"end": 0.3, "start_up": 0.0, "bytes": [48, 48], "part": 1.0}
    known |= {"ready": [0.2, 0.3], "per_byte": 1e-2, "whole": whole}
    return Measured(**(known | others))


class Trying(Talk):
    """A server under osp whose workers take steps in which they defer what they are told."""

    def __init__(self, workers: int, method: OSP | None = None) -> None:
        super().__init__(method or OSP(budget="constant", most=1.0), workers)
        self.begin(*range(workers))
        self.step = 0
        self.masks: list[Sequence[int]] = [()] * len(UNITS)
        self.seen: dict[int, bool] = {}
        """After which steps something is deferred."""

    def steps(
        self,
        until: int,
        whole: Callable[[bool], float],
        workers: Collection[int] = (0, 1),
    ) -> None:
        while self.step < until:
            step, masks = self.step, list(self.masks)
            tells = step % INTERVAL == 0 or (step % INTERVAL == LOOK + 3 and any(masks))
            measured = told(whole(any(masks))) if tells else None
            if not step:
                measured = told(0.0, ready=[], per_byte=0.0)  # none was seen
            answers = defaultdict[int, set[tuple[int, ...]]](set)
            for bucket, sizes in enumerate(UNITS):
                units = [n for n in range(len(sizes)) if n not in masks[bucket]]
                for worker in workers:
                    for answer in self.push(
                        worker, step, bucket, units=units,
                        measured=measured if bucket == len(UNITS) - 1 else None,
                    ):  # fmt: skip
                        answers[answer.message.bucket].add(
                            tuple(read_mask(answer.message.told))
                        )  # type: ignore[union-attr]
            for bucket, late in enumerate(masks):
                for worker in workers if late else ():
                    self.push(worker, step, bucket, units=late, late=True)
            for bucket, masks in answers.items():
                (self.masks[bucket],) = masks  # the same to all
            self.seen[step] = any(self.masks)
            self.step += 1

    def deferring(self) -> set[int]:
        return {step for step, seen in self.seen.items() if seen}


def slow(deferring: bool) -> float:
    return 2.0 if deferring else 1.0


def quick(deferring: bool) -> float:
    return 0.8 if deferring else 1.0


def test_a_server_ends_a_trial_that_fails() -> None:
    case = Trying(2)
    case.steps(AGAIN + 3 * INTERVAL, slow)
    assert case.deferring() == SERVER_TRIAL | {step + AGAIN for step in SERVER_TRIAL}


def test_a_server_goes_on_with_a_trial_that_pays() -> None:
    case = Trying(2)
    case.steps(5 * INTERVAL, quick)
    assert case.deferring() == set(range(INTERVAL + 1, 5 * INTERVAL))


@pytest.mark.parametrize("at", [INTERVAL + 2, INTERVAL + LOOK + 3])
@pytest.mark.parametrize("whole", [slow, quick])
def test_a_worker_dies_during_a_trial(at: int, whole: Callable[[bool], float]) -> None:
    """What the others take without is found out anew; nobody waits for anything."""
    case = Trying(3)
    case.steps(at, whole, (0, 1, 2))
    case.server.on_lost(2, 0, 0.0)
    case.steps(4 * INTERVAL, whole)
    assert set(range(INTERVAL + 1, 2 * INTERVAL + 1)) <= case.deferring()
    later = {step for step in case.deferring() if step > 2 * INTERVAL}
    again = range(3 * INTERVAL + 1, 4 * INTERVAL)
    ends = (
        {step + 2 * INTERVAL for step in SERVER_TRIAL} if whole is slow else set(again)
    )
    assert later == ends


def test_times_that_tell_nothing_begin_no_trial() -> None:
    case = Trying(2)
    case.steps(3 * INTERVAL, lambda deferring: 0.0)
    assert case.deferring() == set()


def test_a_server_that_always_defers_has_no_trial() -> None:
    case = Trying(2, OSP(defer="most", most=1.0, budget="constant"))
    case.steps(3 * INTERVAL, slow)
    assert case.deferring() == set(range(1, 3 * INTERVAL))
