"""One queue of sums by itself: what becomes of it when its network fails, ends, or says a lot."""

import os
import select
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

from paceline.collectives import execute
from paceline.collectives.in_network.job_end import Card
from paceline.collectives.in_network.sum_queue import Line, Terms, _Met
from tests.support.hanging import SECONDS


class Store:
    """A job's store: what it *raises* once that is set, it raises at every look."""

    def __init__(self):
        self.raises = None
        self.looked = threading.Event()

    def check(self, keys):
        if self.raises is not None:
            self.looked.set()
            raise self.raises
        return False

    def set(self, key, value):
        pass


class AddsNothing:
    """An end whose sums are there at once; *fault* is raised while it idles."""

    def __init__(self):
        self.fault = None

    def sum_integers(self, values):
        pass

    def idle(self, seconds, wake):
        if self.fault is not None:
            raise self.fault
        select.select([wake], [], [], 0.01)

    def serve_while(self, work):
        return [_Met(0, leaving=True)]

    def close(self, *, well=True):
        pass


def alone(**more):
    return SimpleNamespace(
        name="training", rank=0, size=1, perform_here=lambda *words: None, **more
    )


def line_of(comm, store, end, path=""):
    terms = Terms({0: ("host", 1)}, store, "job", "token", 1500, 4, ends=False)
    return Line(comm, path, lambda *words, **more: end, terms)


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


@pytest.mark.parametrize("where", ["store", "end"])
def test_an_error_while_it_idles_is_raised_by_the_next_sum_and_all_after_it(where):
    store, end = Store(), AddsNothing()
    line = line_of(alone(), store, end)
    line.start().wait()
    fault = RuntimeError("connection reset")
    if where == "store":
        store.raises = fault
        assert store.looked.wait(SECONDS)
    else:
        end.fault = fault
    # The thread meets the error at one of its next looks; sums before that are in.
    errors = []
    while not errors:
        errors = ended(line.add_up(torch.zeros(4, dtype=torch.int32), 0))
    assert errors == [fault]
    assert ended(line.add_up(torch.zeros(4, dtype=torch.int32), 0)) == [fault]
    line.close()


def test_a_queue_that_is_closed_leaves_no_descriptor():
    def rounds(count):
        for number in range(count):
            line = line_of(alone(), Store(), AddsNothing(), str(number))
            line.start().wait()
            line.close()
        return set(os.listdir("/proc/self/fd"))

    rounds(1)
    assert len(rounds(10)) == len(rounds(10))


def test_words_of_any_length_reach_all_ranks_as_they_are():
    """A refusal may be as long as it is: others raise its reason, whatever they say themselves."""
    size = 3
    fault = "job x: this worker asks for " + "1234567890 " * 700
    cards = [Card(elements=358), Card(fault=fault), Card(elements=358)]
    said = [msgspec.json.encode(card) for card in cards]
    said[0] += b"\0"  # what words end with is theirs
    held = [torch.empty(0)] * size
    meets, parts = threading.Barrier(size), threading.Barrier(size)

    def exchange_of(rank):
        def perform_here(schedule, flat, what):
            held[rank] = flat
            if meets.wait(SECONDS) == 0:
                execute.worked_out(schedule, held, execute.combining("sum"))
            parts.wait(SECONDS)

        comm = SimpleNamespace(
            name="training", rank=rank, size=size, perform_here=perform_here
        )
        heard = []

        def make(rank, where, exchange, **more):
            for words in (said[rank], b"", b"short"):
                heard.append(exchange(words))
            return AddsNothing()

        terms = Terms({0: ("host", 1)}, Store(), "job", "token", 1500, 4, ends=False)
        line = Line(comm, "", make, terms)
        return line, line.start(), heard

    lines = [exchange_of(rank) for rank in range(size)]
    for line, started, heard in lines:
        assert not ended(started)
        assert heard == [said, [b""] * size, [b"short"] * size]
        line.close()
