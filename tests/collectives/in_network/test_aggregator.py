"""Chunks at one aggregator: when sums are complete, where they go, what is refused; and a queue of sums
whose network fails, ends, or says a lot.
"""

import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from paceline.collectives import schedule_execution
from paceline.collectives.in_network import aggregator
from paceline.collectives.in_network.aggregator import (
    Agent,
    ChunkPool,
    ParentLink,
    Send,
)
from paceline.collectives.in_network.joining import Card
from paceline.collectives.in_network.wire import Kind, Mode, Terms
from paceline.collectives.in_network.worker_sums import (
    AggregatorSums,
    LossNotice,
    SumQueue,
)
from paceline.errors import UsageError
from tests.support.hanging import SECONDS

LEASED = Terms(job="job", expected=(2,), window=2, chunk_bytes=1024, agents=3)
BEST_EFFORT = Terms(
    job="job",
    expected=(3,),
    window=2,
    chunk_bytes=1024,
    leased=False,
    parent_of=(0,),
)


def numbers(*values):
    return np.array(values, np.int32)


def said(sends):
    """What goes where, in words that can be compared."""
    return [
        (
            one.to,
            one.kind,
            one.position,
            None if one.values is None else one.values.tolist(),
            one.members,
            said(one.then),
        )
        for one in sends
    ]


def ring_job():
    job = ChunkPool(1 << 20).job_for(LEASED)
    job.workers += ["a", "b"]
    return job


def summed(mode, position=0):
    job = ring_job()
    assert job.contribute("a", position, 1, numbers(1, 2), mode) == []
    return said(job.contribute("b", position, 1, numbers(10, -5), mode))


SUM = [11, -3]
TO_BOTH = [("a", Kind.SUM, 4, SUM, 0, []), ("b", Kind.SUM, 4, SUM, 0, [])]
DONE = [("a", Kind.DONE, 4, None, 0, []), ("b", Kind.DONE, 4, None, 0, [])]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Mode.LOCAL, TO_BOTH),
        (Mode.FORWARD, [(Agent(1), Kind.SUM, 4, SUM, 0, DONE)]),
        (Mode.ONWARD, [(Agent(1), Kind.SUM, 4, SUM, 0, TO_BOTH)]),
    ],
)
def test_a_sum_goes_to_the_next_group_first(mode, expected):
    """Workers hear of it when the next group's agent has it: their windows hold them back, not a
    queue that grows."""
    assert summed(mode, position=4) == expected


def test_who_brings_a_chunk_for_all_is_enough():
    (one,) = ring_job().contribute("a", 4, 2, numbers(11, -3), Mode.ONWARD)
    assert said([one]) == [(Agent(1), Kind.SUM, 4, SUM, 0, TO_BOTH)]


def test_chunks_beyond_the_end_of_the_values_are_empty():
    job = ring_job()
    job.contribute("a", 4, 1, None)
    assert said(job.contribute("b", 4, 1, None)) == DONE


def test_sums_are_modulo_2_to_the_32():
    job = ring_job()
    job.contribute("a", 0, 1, numbers(2**31 - 1))
    assert job.contribute("b", 0, 1, numbers(1))[0].values.tolist() == [-(2**31)]


def test_what_finds_no_room_is_passed_on_and_counts():
    """Of three contributions one finds room: two chunks' worth of memory is the other job's."""
    pool = ChunkPool(12)
    job = pool.job_for(BEST_EFFORT)
    assert job.contribute("a", 0, 1, numbers(1, 2)) == []
    up = ParentLink(0)
    assert job.contribute("a", 1, 1, numbers(5, 5)) == [
        Send(up, Kind.CONTRIBUTION, 1, pytest.approx([5, 5]), 1)
    ]
    assert pool.passed_on == 1
    job.contribute("b", 0, 1, numbers(1, 1))
    (merged,) = job.contribute("c", 0, 1, numbers(1, 1))
    assert (merged.to, merged.members, merged.values.tolist()) == (up, 3, [3, 4])
    assert pool.free == 12
    job.contribute("b", 1, 1, numbers(1, 1))  # there is room now, and it is kept
    (rest,) = job.contribute("c", 1, 1, numbers(1, 1))
    assert (rest.members, rest.values.tolist()) == (2, [2, 2])
    assert [one.to for one in job.result(0, numbers(9, 9))] == ["a", "b", "c"]
    assert [one.to for one in job.result(1, numbers(9, 9))] == ["a", "b", "c"]
    assert job.under_way == 0


def contributed(job, *all_of):
    for one in all_of:
        job.contribute(*one)


REFUSALS = {
    "beyond the window": [("a", 0, 1, None), ("a", 1, 1, None), ("a", 2, 1, None)],
    "more than expected": [("a", 0, 2, None), ("b", 0, 1, None), ("b", 0, 2, None)],
    "one too many": [("a", 0, 3, None)],
    "nobody": [("a", 0, 0, None)],
    "another length": [("a", 0, 1, numbers(1)), ("b", 0, 1, numbers(1, 2))],
    "another mode": [("a", 0, 1, None), ("b", 0, 1, None, Mode.FORWARD)],
    "another kind": [
        ("a", 0, 1, None),
        ("b", 0, 1, None, Mode.LOCAL, Kind.MAXIMUM),
    ],
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_broken_terms_are_refused(refusal):
    job = ChunkPool(1 << 20).job_for(LEASED)
    *good, bad = REFUSALS[refusal]
    contributed(job, *good)
    with pytest.raises(UsageError, match="chunk"):
        job.contribute(*bad)


def test_a_sum_that_goes_on_needs_somebody_who_takes_it():
    job = ChunkPool(1 << 20).job_for(msgspec.structs.replace(LEASED, agents=0))
    with pytest.raises(UsageError, match="mode"):
        job.contribute("a", 0, 1, None, Mode.FORWARD)


def test_a_result_that_nobody_waits_for_is_refused():
    job = ChunkPool(1 << 20).job_for(BEST_EFFORT)
    job.contribute("a", 0, 1, numbers(1))
    for position in (0, 1):
        with pytest.raises(UsageError, match="nobody waits"):
            job.result(position, numbers(1))


@pytest.mark.parametrize(
    ("memory", "window", "chunk_bytes"),
    [(1 << 20, 2, 1024), (3000, 1, 1024), (2048, 1, 1024), (1 << 30, 2, 1024)],
)
def test_a_lease_is_as_much_as_there_is(memory, window, chunk_bytes):
    pool = ChunkPool(memory)
    job = pool.job_for(LEASED)
    assert (job.window, job.chunk_bytes) == (window, chunk_bytes)
    assert pool.free == memory - 2 * window * chunk_bytes
    pool.end(job)
    assert pool.free == memory


def test_a_large_chunk_shrinks_to_what_is_free():
    job = ChunkPool(10_000).job_for(msgspec.structs.replace(LEASED, chunk_bytes=65536))
    assert (job.window, job.chunk_bytes) == (1, 4096)


TERMS = {
    "memory": (2000, {}, "--memory"),
    "no part": (1 << 20, {"expected": (), "parent_of": ()}, "fit together"),
    "no chunk": (1 << 20, {"chunk_bytes": 0}, "fit together"),
    "huge window": (1 << 20, {"window": 1 << 20}, "fit together"),
    "leased with a parent": (1 << 20, {"parent_of": (0,)}, "fit together"),
    "best effort with none": (1 << 20, {"leased": False}, "fit together"),
}


@pytest.mark.parametrize("what", TERMS)
def test_terms_that_cannot_be_are_refused_and_hold_nothing(what):
    memory, changes, words = TERMS[what]
    pool = ChunkPool(memory)
    with pytest.raises(UsageError, match=words):
        pool.job_for(msgspec.structs.replace(LEASED, **changes))
    assert pool.free == memory
    assert not pool.jobs


def test_all_of_a_job_ask_for_the_same_and_jobs_are_not_without_end(monkeypatch):
    pool = ChunkPool(1 << 20)
    job = pool.job_for(LEASED)
    assert pool.job_for(LEASED) is job
    with pytest.raises(UsageError, match="the same terms"):
        pool.job_for(msgspec.structs.replace(LEASED, window=1))
    monkeypatch.setattr(aggregator, "MOST_JOBS", 1)
    with pytest.raises(UsageError, match="already serves"):
        pool.job_for(msgspec.structs.replace(LEASED, job="other"))


class AddsNothing:
    """A session whose sums are there at once, and the way to it; *fault* is raised while it
    idles."""

    def __init__(self):
        self.fault = None

    def join(self, exchange):
        return self

    def all_reduce(self, values, operation):
        pass

    def idle(self, seconds, wake):
        if self.fault is not None:
            raise self.fault
        select.select([wake], [], [], 0.01)

    def close(self, *, well=True):
        pass


def alone(**more):
    return SimpleNamespace(
        name="training", rank=0, size=1, perform_here=lambda *words: None, **more
    )


def ended(job):
    """What *job* raises; a job that never ends is a failure."""
    errors = []

    def wait():
        try:
            job.wait()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "nobody ends this sum"
    return errors


def test_an_error_while_it_idles_is_raised_by_the_next_sum_and_all_after_it():
    session = AddsNothing()
    queue = SumQueue(alone(), "", session, LossNotice())
    queue.start().wait()
    session.fault = fault = RuntimeError("connection reset")
    # The thread meets the error at one of its next looks; sums before that are in.
    errors = []
    while not errors:
        errors = ended(queue.all_reduce(torch.zeros(4, dtype=torch.int32), "sum"))
    assert errors == [fault]
    assert ended(queue.all_reduce(torch.zeros(4, dtype=torch.int32), "sum")) == [fault]
    queue.close()


def test_a_queue_that_is_closed_leaves_no_descriptor():
    def rounds(count):
        for number in range(count):
            queue = SumQueue(alone(), str(number), AddsNothing(), LossNotice())
            queue.start().wait()
            queue.close()
        return set(os.listdir("/proc/self/fd"))

    rounds(1)
    assert len(rounds(10)) == len(rounds(10))


def test_sums_that_are_closed_leave_no_queue():
    row = SimpleNamespace(joining=lambda comm, job: AddsNothing())
    sums = AggregatorSums(row, {}, "job", "token")
    for operation in ("sum", "max"):
        sums.start(alone(chain=SimpleNamespace(path="closed")), operation)

    def queues():
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if "sums of closed" in name]

    assert len(queues()) == 2
    sums.close()
    assert not queues()


def test_words_of_any_length_reach_all_ranks_as_they_are():
    """A refusal may be as long as it is: others raise its reason, whatever they say themselves."""
    size = 3
    fault = "job x: this worker asks for " + "1234567890 " * 700
    cards = [Card(chunk_bytes=4096), Card(fault=fault), Card(chunk_bytes=4096)]
    said = [msgspec.json.encode(card) for card in cards]
    said[0] += b"\0"  # what words end with is theirs
    held = [torch.empty(0)] * size
    meets, parts = threading.Barrier(size), threading.Barrier(size)

    def exchange_of(rank):
        def perform_here(schedule, flat, what, operation="sum"):
            held[rank] = flat
            if meets.wait(SECONDS) == 0:
                schedule_execution.simulate_values(
                    schedule, held, schedule_execution.reduce_function("sum")
                )
            parts.wait(SECONDS)

        comm = SimpleNamespace(
            name="training", rank=rank, size=size, perform_here=perform_here
        )
        heard = []

        class Talks(AddsNothing):
            def join(self, exchange):
                for words in (said[rank], b"", b"short"):
                    heard.append(exchange(words))
                return self

        queue = SumQueue(comm, "", Talks(), LossNotice())
        return queue, queue.start(), heard

    queues = [exchange_of(rank) for rank in range(size)]
    for _, started, heard in queues:
        assert not ended(started)
        assert heard == [said, [b""] * size, [b"short"] * size]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda one: one[0].close(), queues))
