"""The laws of collectives: on lists of transfers, and in the simulated runtime.

A collective of your own:

    from paceline.testing import check_collective
    check_collective(MyCollective)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from queue import Empty, SimpleQueue
from typing import Any

import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.collectives import schedule_execution
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import attach
from paceline.collectives.timing import seconds
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import (
    AllReduceAlgorithm,
    Placement,
    ReduceOperation,
    Schedule,
    Transfer,
)
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from paceline.testing.problems import CheckFailedError, require

RACKS = ((1,), (2,), (3,), (5,), (8,), (2, 2), (4, 3), (1, 3, 2))
"""Clusters on which schedules are checked, by the number of workers in each rack."""
SIZES = (1, 2, 3, 7, 16, 101)
EVEN = 840
"""A size that is divisible by all numbers of workers up to 8."""
PATIENCE = 20.0
"""Seconds after which a message counts as lost."""

Make = Callable[[], AllReduceAlgorithm]


@dataclass(frozen=True)
class CollectiveCheck:
    """A *law* of collectives, and the collectives that it applies to."""

    law: Callable[[Make, Cluster], None]
    applies: Callable[[AllReduceAlgorithm], bool] = lambda algorithm: True

    @property
    def name(self) -> str:
        return self.law.__name__


def check_collective(
    make: Make, racks: Sequence[Sequence[int]] = RACKS, laws: Sequence[str] = ()
) -> None:
    """Check all laws that apply to a collective.

    Args:
        make: Makes a collective, for example its class. Each worker has its own.
        racks: Clusters, by the number of workers in each of their racks.
        laws: Names of `COLLECTIVE_CHECKS`; all by default.

    Raises:
        CheckFailedError: A law of schedules does not hold; the first one. Its note names the law.
        WorkerFailedError: A law of the simulated runtime does not hold; its cause has the reason.

    Example:
        ::

            check_collective(Line, racks=[(4,)])
    """
    checks = [COLLECTIVE_CHECKS[name] for name in laws or COLLECTIVE_CHECKS]
    with_aggregators = (False, True) if make().needs == "aggregators" else (False,)
    for check, workers, aggregates in product(checks, racks, with_aggregators):
        if not check.applies(make()):
            continue
        try:
            check.law(make, _cluster(workers, aggregates))
        except PacelineError as error:
            where = f"racks of {list(workers)} workers"
            error.add_note(f"conformance: {make().name}, {where}, {check.name}")
            raise


def _cluster(workers: Sequence[int], aggregates: bool) -> Cluster:
    return Cluster(
        tuple(
            Rack(
                workers=count,
                link=25e6,
                latency=50e-6,
                uplink=25e6,
                uplink_latency=50e-6,
                aggregates=aggregates,
            )
            for count in workers
        )
    )


def _placements(cluster: Cluster) -> Iterator[Placement]:
    """Placements of all workers: in order, in reverse order, and unknown."""
    yield Placement.on(cluster)
    yield Placement.on(cluster, range(cluster.workers)[::-1])
    yield Placement(tuple(range(cluster.workers)))


def _schedules(make: Make, cluster: Cluster) -> Iterator[tuple[int, Schedule]]:
    """Schedules that ranks can perform, with their sizes."""
    for at in _placements(cluster):
        for size in SIZES:
            schedule = make().schedule(size, at)
            if schedule.performable:
                yield size, schedule


def _numbers(ranks: int, size: int) -> list[torch.Tensor]:
    """Different integers for each rank and element."""
    return [torch.arange(size) * 10**rank + rank for rank in range(ranks)]


# ---- laws of schedules ----


def schedules_are_equal_on_all_ranks(make: Make, cluster: Cluster) -> None:
    for at in _placements(cluster):
        first, second = (make().schedule(EVEN, at) for _ in range(2))
        require(
            first == second and hash(first) == hash(second),
            "two ranks have different schedules of the same sum: expected equal ones. Make a "
            "schedule only from the size and the placement",
        )
        require(
            first.ranks == at.size,
            f"a schedule has {first.ranks} ranks: expected {at.size}, the number of workers",
        )


def transfers_lie_in_the_buffer(make: Make, cluster: Cluster) -> None:
    for size, schedule in _schedules(make, cluster):
        for one in _all(schedule):
            ends = {one.source, one.destination}
            require(
                len(ends) == 2 and ends <= set(range(schedule.ranks)),
                f"{one}: expected two different ranks of {schedule.ranks}",
            )
            require(
                min(one.offset, one.size) >= 0 and one.offset + one.size <= size,
                f"{one}: expected a part of the buffer of {size} units",
            )


def sums_and_maxima_are_exact(make: Make, cluster: Cluster) -> None:
    for size, schedule in _schedules(make, cluster):
        held = _numbers(schedule.ranks, size)
        exact: dict[ReduceOperation, torch.Tensor] = {
            "sum": torch.stack(held).sum(0),
            "max": torch.stack(held).amax(0),
        }
        for operation, expected in exact.items():
            found = [one.clone() for one in held]
            combine = schedule_execution.reduce_function(operation)
            schedule_execution.simulate_values(schedule, found, combine)
            for rank, one in enumerate(found):
                require(
                    torch.equal(one, expected),
                    f"the {operation} of {size} units is wrong on rank {rank}",
                )


def own_steps_are_those_of_the_schedule(make: Make, cluster: Cluster) -> None:
    for size, schedule in _schedules(make, cluster):
        steps = [list(schedule.step(number)) for number in range(schedule.steps)]
        for rank in range(schedule.ranks):
            expected = [
                [one for one in step if rank in (one.source, one.destination)]
                for step in steps
            ]
            found = [list(step) for step in schedule.own_steps(rank)]
            require(
                len(found) == len(expected)
                and all(map(_same_at(rank), found, expected)),
                f"own_steps({rank}) of {size} units: expected the steps of that rank, in order",
            )


def _same_at(rank: int) -> Callable[[list[Transfer], list[Transfer]], bool]:
    """Compares whether *rank* sends and receives the same transfers in the same order."""

    def same(found: list[Transfer], expected: list[Transfer]) -> bool:
        return len(found) == len(expected) and all(
            [one for one in found if getattr(one, end) == rank]
            == [one for one in expected if getattr(one, end) == rank]
            for end in ("source", "destination")
        )

    return same


def bytes_sent_are_as_declared(make: Make, cluster: Cluster) -> None:
    for size, schedule in _schedules(make, cluster):
        sent = Counter[int]()
        for one in _all(schedule):
            sent[one.source] += one.size
        for rank in range(schedule.ranks):
            declared = schedule.bytes_sent(rank)
            require(
                declared == sent[rank],
                f"bytes_sent({rank}) of {size} units is {declared}: expected {sent[rank]}, "
                "which the transfers send",
            )


def activities_carry_what_is_sent(make: Make, cluster: Cluster) -> None:
    """The activities' traffic on each connection equals the transfers', if the size is divisible by all
    numbers of ranks."""
    for at in _placements(cluster):
        schedule = make().schedule(EVEN, at)
        phases = schedule.phases()
        if phases is None or not schedule.performable:
            continue
        sent, priced = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for one in _all(schedule):
            sent[one.source, one.destination] += one.size
        for activity in (activity for phase in phases for activity in phase):
            for connection, count in activity.traffic().items():
                priced[connection] += round(count * activity.bytes)
        require(
            +sent == +priced,
            f"activities send {dict(+priced)} from rank to rank, but transfers send {dict(+sent)}",
        )


def values_simulated_are_values_performed(make: Make, cluster: Cluster) -> None:
    """The results are bit-equal: each rank performs its steps in a thread of its own."""
    if cluster.workers == 1:
        return
    for at in _placements(cluster):
        schedule = make().schedule(SIZES[-1], at)
        if not schedule.performable:
            continue
        draw = torch.Generator().manual_seed(at.size)
        held = [torch.randn(SIZES[-1], generator=draw) for _ in range(at.size)]
        expected = [one.clone() for one in held]
        combine = schedule_execution.reduce_function("sum")
        schedule_execution.simulate_values(schedule, expected, combine)
        _perform_together(schedule, held)
        for rank, (one, other) in enumerate(zip(held, expected, strict=True)):
            require(
                torch.equal(one, other),
                f"rank {rank}: the performed sum and the simulated one are not bit-equal",
            )


class _Arrival:
    """A receive that `execute.perform` waits for: it puts the next message of a queue *into* a tensor."""

    def __init__(self, queue: SimpleQueue[torch.Tensor], into: torch.Tensor) -> None:
        self._queue, self._into = queue, into

    def wait(self) -> None:
        self._into.copy_(self._queue.get(timeout=PATIENCE))


class _Sent:
    def wait(self) -> None:
        """Return at once: a send has already left."""


def _perform_together(schedule: Schedule, held: Sequence[torch.Tensor]) -> None:
    ranks = range(schedule.ranks)
    queues: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {
        (a, b): SimpleQueue() for a in ranks for b in ranks
    }
    errors: list[BaseException] = []

    def perform(rank: int) -> None:
        def send(part: torch.Tensor, to: int) -> _Sent:
            queues[rank, to].put(part.clone())
            return _Sent()

        def receive(into: torch.Tensor, source: int) -> _Arrival:
            return _Arrival(queues[source, rank], into)

        try:
            steps = schedule_execution.steps_of(schedule, rank)
            combine = schedule_execution.reduce_function("sum")
            schedule_execution.perform(steps, held[rank], combine, send, receive)
        except Empty:
            errors.append(
                CheckFailedError(
                    f"rank {rank} waits for a message that no rank sends within {PATIENCE:g} s"
                )
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=perform, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def halves_are_the_whole(make: Make, cluster: Cluster) -> None:
    """The two halves give bit-equal results; between them each part of the sum is complete on some rank."""
    for size, schedule in _schedules(make, cluster):
        try:
            adding, spreading = schedule.halves()
        except UsageError:
            continue
        require(
            adding is not None and spreading is not None,
            "halves() of a whole all-reduce has returned None: expected two schedules",
        )
        assert adding is not None
        assert spreading is not None
        combine = schedule_execution.reduce_function("sum")
        expected = [one.double() / 3 for one in _numbers(schedule.ranks, size)]
        held, numbers = (
            [one.clone() for one in expected],
            _numbers(schedule.ranks, size),
        )
        total = torch.stack(numbers).sum(0)
        schedule_execution.simulate_values(schedule, expected, combine)
        for tensors in (held, numbers):
            schedule_execution.simulate_values(adding, tensors, combine)
        whole = torch.stack([one == total for one in numbers]).any(0)
        require(
            bool(whole.all()),
            "after the first half no rank has the complete sum of some part of the buffer",
        )
        schedule_execution.simulate_values(spreading, held, combine)
        require(
            all(map(torch.equal, held, expected)),
            "the result of both halves differs from the whole all-reduce",
        )
        require(
            all(one.adds for one in _all(adding))
            and not any(one.adds for one in _all(spreading)),
            "expected additions in all transfers of the first half, and in none of the second",
        )
        for rank in range(schedule.ranks):
            sent = adding.bytes_sent(rank) + spreading.bytes_sent(rank)
            require(
                sent == schedule.bytes_sent(rank),
                f"both halves send {sent} units on rank {rank}: expected "
                f"{schedule.bytes_sent(rank)}, as in the whole all-reduce",
            )


def _all(schedule: Schedule) -> list[Transfer]:
    return [one for number in range(schedule.steps) for one in schedule.step(number)]


# ---- laws in the simulated runtime ----


def _between_workers(algorithm: AllReduceAlgorithm) -> bool:
    return algorithm.needs != "servers"


def _simulated(
    make: Make, cluster: Cluster, body: Callable[[Communicator], Any]
) -> list[Any]:
    """Run *body* on each worker, with a communicator that uses the collective; returns the results."""
    found: dict[int, Any] = {}

    def worker(rank: int) -> None:
        paceline.init()
        runtime = join_runtime()
        comm = attach(make(), runtime, Communicator(runtime, "law"))
        found[rank] = body(comm)
        comm.close()

    Simulation(cluster).run(worker)
    return [found[rank] for rank in range(cluster.workers)]


def any_group_forms_its_own_sum(make: Make, cluster: Cluster) -> None:
    """An all-reduce works for any type and shape, and in groups with ranks in another order."""
    held: dict[str, Callable[[int], torch.Tensor]] = {
        "sum": lambda rank: torch.arange(7) + 10 * rank,
        "max": lambda rank: torch.tensor([[float(rank), -1.0], [-float(rank), 2.0]]),
        "mean": lambda rank: torch.tensor([complex(rank, 2.0)]),
    }

    def body(comm: Communicator) -> None:
        everybody = tuple(range(comm.size))
        parity = [rank for rank in everybody if rank % 2 == comm.rank % 2]
        for members in (everybody, everybody[::-1], tuple(parity)):
            group = comm.group(members)
            for operation, made in held.items():
                buffer = made(comm.rank)
                whole = torch.stack([made(rank) for rank in members])
                expected = whole.amax(0) if operation == "max" else whole.sum(0)
                if operation == "mean":
                    expected = expected / len(members)
                group.all_reduce(buffer, operation).wait()  # type: ignore[arg-type]
                require(
                    torch.allclose(buffer, expected),
                    f"the {operation} of group {members} is {buffer.tolist()} on rank "
                    f"{comm.rank}, expected {expected.tolist()}",
                )

    _simulated(make, cluster, body)


def an_all_reduce_is_its_schedule(make: Make, cluster: Cluster) -> None:
    """It sends as many bytes as the schedule, and takes the schedule's estimated seconds on idle links.

    A sum at switches takes longer: the ranks agree on exponents before.
    """
    at, count = Placement.on(cluster), 6 * EVEN

    def body(comm: Communicator) -> tuple[int, float]:
        runtime = join_runtime()
        before, start = runtime.recorder.bytes_sent, runtime.clock.now()
        comm.all_reduce(torch.ones(count), "sum").wait()
        return runtime.recorder.bytes_sent - before, runtime.clock.now() - start

    found = _simulated(make, cluster, body)
    schedule = make().schedule(4 * count, at)
    took, priced = max(took for _, took in found), seconds(schedule, cluster)
    pairs = [(f"{took} s", took, priced)] + [
        (f"{sent} bytes on rank {rank}", sent, schedule.bytes_sent(rank))
        for rank, (sent, _) in enumerate(found)
    ]
    for what, one, expected in pairs:
        exact = schedule.performable
        holds = abs(one - expected) <= 1e-9 * expected if exact else one >= expected
        require(
            holds, f"an all-reduce takes {what}: expected {expected}, as its schedule"
        )


COLLECTIVE_CHECKS: dict[str, CollectiveCheck] = {
    check.name: check
    for check in (
        CollectiveCheck(schedules_are_equal_on_all_ranks),
        CollectiveCheck(transfers_lie_in_the_buffer),
        CollectiveCheck(sums_and_maxima_are_exact),
        CollectiveCheck(own_steps_are_those_of_the_schedule),
        CollectiveCheck(bytes_sent_are_as_declared),
        CollectiveCheck(activities_carry_what_is_sent),
        CollectiveCheck(values_simulated_are_values_performed),
        CollectiveCheck(halves_are_the_whole),
        CollectiveCheck(any_group_forms_its_own_sum, _between_workers),
        CollectiveCheck(an_all_reduce_is_its_schedule, _between_workers),
    )
}
