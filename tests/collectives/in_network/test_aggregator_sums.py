"""One queue of sums by itself: what becomes of it when its network fails, ends, or says a lot."""

import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import torch

from paceline.collectives import execute
from paceline.collectives.in_network.aggregator_sums import LossNotice, SumQueue
from paceline.collectives.in_network.joining import Card
from tests.support.hanging import SECONDS


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
                execute.simulate_values(schedule, held, execute.reduce_function("sum"))
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
