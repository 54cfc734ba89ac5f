"""What collectives cost in virtual time, against times worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.cluster import Cluster
from paceline.collectives.communicator import Communicator
from paceline.errors import CollectiveMismatchError, DeadlockError, WorkerFailedError
from paceline.runtimes.join import join_runtime
from tests.support.simulations import (
    LATENCY,
    LINK,
    cluster,
    rack,
    run,
    run_on,
    simulation,
)
from tests.support.tables import crossed

MS = 1e-3


def all_reduce(size: int, **keys) -> dist.Work | None:
    return dist.all_reduce(torch.zeros(size // 4), **keys)


def ends_of(where: int | Cluster, call: Callable[[int], Any], **options) -> list[float]:
    """When each worker's call is over."""

    def body(rank: int) -> float:
        call(rank)
        return paceline.now()

    return run(where, body, **options)


both_ways = pytest.mark.parametrize(
    ("play", "close"), [(False, 1e-9), (True, 0.05)], ids=["priced", "played"]
)
"""A ring that is priced is as the formula says; one that is played is within 5 percent."""


# ---- rings ----


@pytest.mark.parametrize("n", [2, 5, 8, 16])
def test_ring_alone_costs_what_the_formula_says(n: int) -> None:
    # 2 (n - 1) (latency + bytes / n / bandwidth). With n = 8:
    # 14 x (0.05 ms + 100,000 B / 25,000,000 B/s = 4 ms) = 56.7 ms.
    expected = 2 * (n - 1) * (50e-6 + 800_000 / n / 25e6)
    if n == 8:
        assert expected == pytest.approx(56.7 * MS, rel=1e-12)
    ends = ends_of(n, lambda rank: all_reduce(800_000))
    assert ends == [pytest.approx(expected, rel=1e-9)] * n


@pytest.mark.parametrize(
    ("n", "size"), crossed(2, [2, 3, 5, 8, 16], [4, 64, 960_000, 4 * 99_991])
)
def test_ring_played_equals_priced(n: int, size: int) -> None:
    (priced,) = set(ends_of(n, lambda rank: all_reduce(size)))
    played = ends_of(n, lambda rank: all_reduce(size), play=True)
    assert max(played) == pytest.approx(priced, rel=1e-9)
    # Where segments differ by a byte, some rank has only smaller ones.
    slack = 0 if size % n == 0 else 2 * (n - 1) / 25e6
    assert min(played) >= (priced - slack) * (1 - 1e-9)


def test_reduce_scatter_and_all_gather_are_half_a_ring_each() -> None:
    # Four workers, 800 kB in all: 3 x (0.05 ms + 200,000 / 25e6 = 8 ms) = 24.15 ms.
    def body(rank: int) -> list[float]:
        ends = []
        whole, part = torch.zeros(200_000), torch.zeros(50_000)
        dist.all_gather_single(whole, part)
        ends.append(paceline.now())
        dist.reduce_scatter_single(part, whole)
        ends.append(paceline.now())
        dist.all_gather([torch.zeros(50_000) for _ in range(4)], part)
        ends.append(paceline.now())
        return ends

    expected = [24.15 * MS, 48.3 * MS, 72.45 * MS]
    for play in (False, True):
        assert run(4, body, play=play) == [pytest.approx(expected, rel=1e-9)] * 4


def test_ring_over_racks_pays_its_longest_chain_of_latencies() -> None:
    # Ranks 0, 1 | 2: edges 1 ms, 1/2 + 4/2 + 10 = 12.5 ms, 12.5 ms. Four steps: once
    # round (26 ms) and one edge more, at worst 12.5. Bytes: 4 steps of 4 B at 25 MB/s.
    racks = cluster(
        rack(2, latency=1 * MS), rack(1, latency=4 * MS, uplink_latency=10 * MS)
    )
    expected = 38.5 * MS + 4 * 4 / 25e6
    ends = ends_of(racks, lambda rank: all_reduce(12))
    assert ends == [pytest.approx(expected, rel=1e-9)] * 3


@both_ways
def test_two_rings_share_an_uplink(play: bool, close: float) -> None:
    # Two groups of four, each in both racks, whose uplinks are as fast as one link. Each
    # ring crosses each uplink once: 12.5 MB/s each way for either.
    # 6 x (0.05 ms + 200,000 B / 12.5e6 B/s = 16 ms) = 96.3 ms.
    def call(rank: int) -> None:
        groups = [dist.new_group([0, 1, 4, 5]), dist.new_group([2, 3, 6, 7])]
        all_reduce(800_000, group=groups[rank // 2 % 2])

    ends = ends_of(cluster(*[rack(4, uplink=25e6)] * 2), call, play=play)
    assert ends == [pytest.approx(96.3 * MS, rel=close)] * 8


@both_ways
def test_a_ring_starts_when_its_last_rank_arrives(play: bool, close: float) -> None:
    def call(rank: int) -> None:
        paceline.pace(20 * MS if rank == 3 else 0)
        all_reduce(800_000)

    ends = ends_of(8, call, play=play)
    assert ends == [pytest.approx(76.7 * MS, rel=close)] * 8


def test_a_ring_and_an_incast_share_an_uplink() -> None:
    # Two racks of four, uplinks of 10 MB/s, no latency. The ring crosses down into rack 0
    # once (7 to 0), beside three messages of 250 kB (4, 5 and 6 to 0): 2.5 MB/s each.
    # The messages take 100 ms. Of the ring's 14 x 100 kB, 250 kB have moved by then; the
    # other 1.15 MB take 115 ms at 10 MB/s.
    racks = cluster(*[rack(4, latency=0, uplink=10e6)] * 2)

    def body(rank: int) -> tuple[float, float]:
        ring = all_reduce(800_000, async_op=True)
        message = torch.zeros(62_500)
        works = []
        if rank == 0:
            works = [dist.irecv(torch.zeros(62_500), source) for source in (4, 5, 6)]
        elif rank in (4, 5, 6):
            works = [dist.isend(message, 0)]
        for work in works:
            work.wait()
        messages_in = paceline.now()
        ring.wait()
        return messages_in, paceline.now()

    ends = run(racks, body)
    for rank in (0, 4, 5, 6):
        assert ends[rank] == pytest.approx((100 * MS, 215 * MS), rel=1e-9)
    assert [end for _, end in ends] == [pytest.approx(215 * MS, rel=1e-9)] * 8


# ---- lanes ----


# 2 MB over 8 workers at 25 MB/s: 14 x 250,000 / 25e6 = 140 ms, after 14 latencies of
# 0.05 ms. On two lanes two share the links, then the third has them for itself.
LANES = {1: (140.7, 281.4, 422.1), 2: (280.7, 280.7, 421.4), 3: (420.7,) * 3}


@both_ways
@pytest.mark.parametrize("lanes", LANES)
def test_three_all_reduces_on_lanes(lanes: int, play: bool, close: float) -> None:
    def body(rank: int) -> list[float]:
        works = [all_reduce(2_000_000, async_op=True) for _ in range(3)]
        ends = []
        for work in works:
            work.wait()
            ends.append(paceline.now() / MS)
        return ends

    ends = run(8, body, lanes=lanes, play=play)
    assert ends == [pytest.approx(LANES[lanes], rel=close)] * 8


def test_a_lane_is_free_when_its_operation_is_complete() -> None:
    # One lane: the second all-reduce, launched at once, waits for the first; the third,
    # launched late, for nobody.
    def call(rank: int) -> None:
        first = all_reduce(800_000, async_op=True)
        all_reduce(800_000)
        assert first.is_completed()
        paceline.pace(1.0)
        all_reduce(800_000)

    assert ends_of(8, call, lanes=1) == [pytest.approx(1.0 + 3 * 56.7 * MS)] * 8


def test_groups_have_lanes_of_their_own() -> None:
    # No lanes are shared, but links are: both end when 2 x 56 ms of bytes have moved.
    def call(rank: int) -> None:
        other = dist.new_group(list(range(8)))
        works = [
            all_reduce(800_000, async_op=True),
            all_reduce(800_000, async_op=True, group=other),
        ]
        for work in works:
            work.wait()

    expected = 2 * 56 * MS + 0.7 * MS
    assert ends_of(8, call, lanes=1) == [pytest.approx(expected, rel=1e-6)] * 8


# ---- trees and others, which are always played ----


def test_broadcast_starts_pair_by_pair() -> None:
    # 100 kB take 4 ms on a link. The root sends to 1 and 2, half a link each: 8 ms and a
    # latency of 0.05. Then 1 sends to 3: 4.05 ms more.
    ends = ends_of(4, lambda rank: dist.broadcast(torch.zeros(25_000), 0))
    assert ends == pytest.approx([8 * MS, 12.05 * MS, 8.05 * MS, 12.1 * MS])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Whoever is there does not wait for rank 1, which is 1 s late.
        (
            lambda rank: dist.scatter(
                torch.zeros(1), list(torch.zeros(4, 1)) if rank == 0 else None, 0
            ),
            [1.0, 1.0, 0.0, 0.0],
        ),
        (
            lambda rank: dist.gather(
                torch.zeros(1), [torch.zeros(1)] * 4 if rank == 0 else None, 0
            ),
            [1.0, 1.0, 0.0, 0.0],
        ),
        # In the tree, 3 hangs on 1.
        (lambda rank: dist.broadcast(torch.zeros(1), 0), [1.0, 1.0, 0.0, 1.0]),
        # Towards the root, 3 sends to 1.
        (lambda rank: dist.reduce(torch.zeros(1), 0), [1.0, 1.0, 0.0, 1.0]),
        (lambda rank: dist.barrier(), [1.0] * 4),
        (lambda rank: dist.all_reduce(torch.zeros(1)), [1.0] * 4),
    ],
    ids=["scatter", "gather", "broadcast", "reduce", "barrier", "all_reduce"],
)
def test_who_waits_for_a_late_rank(call, expected: list[float]) -> None:
    def late_call(rank: int) -> None:
        paceline.pace(1.0 if rank == 1 else 0.0)
        call(rank)

    # Latencies add up to less than a millisecond.
    assert ends_of(4, late_call) == pytest.approx(expected, abs=1 * MS)


def barrier_by_the_rule(where: Cluster, arrivals: list[float]) -> list[float]:
    """When each rank leaves: messages of step s go once those of all earlier steps are in
    at the sender, and both ends are there."""
    n = len(arrivals)
    known, sent = list(arrivals), list(arrivals)
    distance = 1
    while distance < n:
        arrived = known.copy()
        for source in range(n):
            destination = (source + distance) % n
            start = max(known[source], arrivals[destination])
            sent[source] = max(sent[source], start)
            latency = where.latency(source, destination)
            arrived[destination] = max(known[destination], start + latency)
        known = arrived
        distance *= 2
    return [max(pair) for pair in zip(known, sent, strict=True)]


@pytest.mark.slow
def test_a_barrier_keeps_its_rule_whatever_the_latencies() -> None:
    chance = random.Random(0)
    for _ in range(60):
        n = chance.randint(2, 9)
        where = cluster(
            *[
                rack(1, latency=0, uplink_latency=chance.choice([0.001, 1.0, 5.0]))
                for _ in range(n)
            ]
        )
        arrivals = [chance.choice([0.0, 0.0, 0.5, 3.0, 10.0]) for _ in range(n)]

        def call(rank: int, arrivals: list[float] = arrivals) -> None:
            paceline.pace(arrivals[rank])
            dist.barrier()

        left = ends_of(where, call)
        assert left == pytest.approx(barrier_by_the_rule(where, arrivals), rel=1e-9)
        assert min(left) >= max(arrivals)


def test_collectives_of_nothing_and_of_one() -> None:
    def body(rank: int) -> float:
        mine = dist.new_group([rank], use_local_synchronization=True)
        t = torch.full((3,), float(rank))
        for work in (
            dist.all_reduce(t, group=mine, async_op=True),
            dist.broadcast(t, rank, group=mine, async_op=True),
            dist.barrier(mine, async_op=True),
        ):
            work.wait()
        assert t.tolist() == [rank] * 3
        alone = paceline.now()
        dist.all_reduce(torch.zeros(0))
        return alone

    assert run(3, body) == [0.0] * 3
    # Four latencies: an empty all-reduce still takes its steps.
    outcome = simulation(3).run(lambda rank: (paceline.init(), all_reduce(0)))
    assert outcome.virtual_seconds == pytest.approx(4 * 50e-6)


@pytest.mark.slow
def test_scatter_of_nothing_to_many() -> None:
    def body(rank: int) -> None:
        parts = list(torch.zeros(400, 0)) if rank == 0 else None
        dist.scatter(torch.zeros(0), parts, 0)

    run(400, body)


# ---- what can go wrong ----


@pytest.mark.parametrize("play", [False, True])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: all_reduce(8), "all_reduce(SUM, float32[2])"),
        (lambda: dist.broadcast(torch.ones(4), 1), "broadcast(from 1, float32[4])"),
    ],
    ids=["all_reduce", "broadcast"],
)
def test_deadlock_names_the_call_and_who_has_not_made_it(play, call, name: str) -> None:
    def body(rank: int) -> None:
        dist.barrier()
        if rank != 1:
            call()

    with pytest.raises(DeadlockError) as caught:
        run(3, body, play=play)
    message = str(caught.value)
    said = f"{name}, operation 1 on group 'world'; not called by worker 1"
    for rank in (0, 2):
        assert f"worker {rank} waits for {said}" in message
    assert "worker 1 has ended" in message


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda rank: dist.recv(torch.zeros(1), 0, tag=5) if rank else None,
            ["worker 1 waits for receive from worker 0, tag 5, on group 'world'"],
        ),
        (
            lambda rank: dist.send(torch.zeros(1), 1 - rank),
            [
                "worker 0 waits for send to worker 1",
                "worker 1 waits for send to worker 0",
            ],
        ),
    ],
    ids=["a receive", "two that both send first"],
)
def test_deadlock_of_a_message_names_its_two_workers(call, said: list[str]) -> None:
    with pytest.raises(DeadlockError) as caught:
        run(2, call)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            lambda: dist.all_reduce(torch.zeros(4)),
            lambda: dist.all_reduce(torch.zeros(5)),
            ("all_reduce(SUM, float32[4])", "all_reduce(SUM, float32[5])"),
        ),
        (
            lambda: dist.all_reduce(torch.zeros(4)),
            lambda: dist.all_reduce(torch.zeros(4, dtype=torch.float64)),
            ("all_reduce(SUM, float32[4])", "all_reduce(SUM, float64[4])"),
        ),
        (
            lambda: dist.all_reduce(torch.zeros(2, 3)),
            lambda: dist.all_reduce(torch.zeros(2, 3), op=dist.ReduceOp.MAX),
            ("all_reduce(SUM, float32[2x3])", "all_reduce(MAX, float32[2x3])"),
        ),
        (
            lambda: dist.broadcast(torch.zeros(4), 0),
            lambda: dist.broadcast(torch.zeros(4), 1),
            ("broadcast(from 0, float32[4])", "broadcast(from 1, float32[4])"),
        ),
        (
            lambda: dist.barrier(),
            lambda: dist.all_reduce(torch.zeros(4)),
            ("barrier()", "all_reduce(SUM, float32[4])"),
        ),
    ],
    ids=["size", "dtype", "operation", "root", "collective"],
)
def test_mismatched_collectives_name_both_workers_and_calls(
    ours, theirs, said: tuple[str, str]
) -> None:
    def body(rank: int) -> None:
        dist.barrier()
        theirs() if rank == 2 else ours()

    with pytest.raises(CollectiveMismatchError) as caught:
        run(3, body)
    message = str(caught.value)
    assert "operation 1 on group 'world'" in message
    for worker, call in zip((0, 2), said, strict=True):
        assert f"worker {worker} called {call}" in message


# ---- spans ----


def test_spans_show_each_worker_lane_and_time() -> None:
    runtime = simulation(2, lanes=1, trace=True)

    def body(rank: int) -> None:
        paceline.pace(0.25 if rank else 0.0)
        all_reduce(100_000)
        work = all_reduce(100_000, async_op=True)
        dist.barrier()
        work.wait()

    run_on(runtime, body)
    spans = [span for span in runtime.result.spans if span.worker == 0]
    assert [span.name for span in spans] == [
        "all_reduce(SUM, float32[25000]), 100 kB sent",
        "all_reduce(SUM, float32[25000]), 100 kB sent",
        "barrier(), 0 B sent",
    ]
    assert {span.row for span in spans} == {"world lane 0"}
    # Present from 0; the other comes at 0.25; 2 x (0.05 + 2 ms) each; a barrier 0.05 ms.
    times = [(span.start, span.end) for span in spans]
    expected = [(0, 0.2541), (0.2541, 0.2582), (0.2582, 0.25825)]
    assert times == [pytest.approx(pair) for pair in expected]
    assert next(s.start for s in runtime.result.spans if s.worker == 1) == 0.25


def test_without_a_trace_no_spans_are_kept() -> None:
    assert simulation(2).run(lambda rank: (paceline.init(), all_reduce(8))).spans == []


# ---- what follows results: when it runs, what it costs, whose it is ----

SIZE = 300_000
"""Elements of four bytes."""
RING = 4 * LATENCY + 4 / 3 * 4 * SIZE / LINK
"""Seconds of an all-reduce of so many on three workers: 2 (n - 1) steps of a third."""


def comm_of(name: str = "test") -> Communicator:
    return Communicator(join_runtime(), name)


def test_a_second_round_begins_when_the_first_ends():
    def body(rank):
        comm = comm_of()
        buffer = torch.ones(SIZE)
        ended = []

        def second():
            ended.append(paceline.now())
            return comm.all_reduce(buffer, "sum")

        pending = comm.all_reduce(buffer, "sum").then(second)
        paceline.pace(10.0)  # the worker itself computes on
        assert paceline.now() == pytest.approx(10.0)
        pending.wait()
        return ended[0], paceline.now()

    for first, after in run(3, body):
        assert first == pytest.approx(RING)
        assert after == pytest.approx(10.0)  # both rounds were hidden


def test_what_a_work_computes_delays_what_it_issues_and_nothing_else():
    def body(rank):
        runtime, comm = join_runtime(), comm_of()
        buffer = torch.ones(SIZE)

        def second():
            runtime.clock.charge(2.0, "coding")
            assert runtime.clock.now() == pytest.approx(RING + 2.0)
            return comm.all_reduce(buffer, "sum")

        pending = comm.all_reduce(buffer, "sum").then(second)
        assert paceline.now() == 0
        pending.wait()
        return paceline.now()

    assert run(3, body) == [pytest.approx(2 * RING + 2.0)] * 3


def test_works_of_a_worker_compute_one_after_the_other():
    def body(rank):
        runtime, comm = join_runtime(), comm_of()
        ends = []
        for _ in range(3):
            pending = comm.all_reduce(torch.ones(1), "sum").then(
                lambda: runtime.clock.charge(1.0, "coding")
            )
            ends.append(pending)
        times = []
        for pending in ends:
            pending.wait()
            times.append(paceline.now())
        return times

    for times in run(3, body):
        assert times == [pytest.approx(n, abs=0.01) for n in (1, 2, 3)]


def test_a_work_that_is_chained_late_runs_then():
    def body(rank):
        comm = comm_of()
        when = []
        pending = comm.all_reduce(torch.ones(1), "sum")
        paceline.pace(5.0)
        pending.then(lambda: when.append(paceline.now())).wait()
        return when[0]

    assert run(3, body) == [pytest.approx(5.0)] * 3


def test_random_states_of_a_worker_are_its_own():
    """Whatever its works draw, and whenever they run."""

    def body(rank, draws):
        comm = comm_of()
        torch.manual_seed(rank)
        random.seed(rank)
        values = []

        def work():
            if draws:
                torch.rand(3), random.random()

        pendings = []
        for _ in range(4):
            pendings.append(comm.all_reduce(torch.ones(9), "sum").then(work))
            values += [torch.rand(1).item(), random.random()]
            paceline.pace(0.001 * rank)
        for pending in pendings:
            pending.wait()
            values += [torch.rand(1).item(), random.random()]
        return values

    drawn = run(3, lambda rank: body(rank, True))
    assert drawn == run(3, lambda rank: body(rank, False))
    assert len({tuple(values) for values in drawn}) == 3


def test_a_rank_whose_work_fails_is_named_to_all():
    def body(rank):
        comm = comm_of()
        buffer = torch.ones(2)

        def second():
            if rank == 1:
                raise ValueError("a code that fits nothing")
            return comm.all_reduce(buffer, "sum")

        comm.all_reduce(buffer, "sum").then(second).wait()

    with pytest.raises(WorkerFailedError, match="worker 1 raised ValueError"):
        run(3, body)


def test_a_script_s_own_collective_in_a_work_does_not_block():
    def body(rank):
        comm = comm_of()

        def second():
            torch.distributed.all_reduce(torch.ones(1))

        comm.all_reduce(torch.ones(2), "sum").then(second).wait()

    with pytest.raises(WorkerFailedError, match="waits for all_reduce"):
        run(3, body)
