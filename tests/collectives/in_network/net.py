"""Machines of an aggregator and of its workers, over a network that a test steers.

Every datagram is a letter of its own. `play` lets numbers decide what happens to letters: they
come in any order, twice, never, or again when all has long gone on (the archive keeps all
that were ever sent). `settle` is a network without faults, in which everybody must end.
"""

from dataclasses import dataclass, field

import numpy as np

from paceline.collectives.in_network.best_effort import BestEffort, FallbackServer
from paceline.collectives.in_network.forwarding import Inbox
from paceline.collectives.in_network.packets import LOCAL, Flag, Kind
from paceline.collectives.in_network.slots import (
    EVERYONE,
    NEXT,
    Memory,
    Slots,
    all_bits,
)
from paceline.collectives.in_network.stream import Stream

ELEMENTS = 4
"""Of a row: more than the tests' datagrams have, as in an aggregator with a larger MTU."""
MOST_TURNS = 2000


class Recorded:
    """An operation that remembers which chunks of the stream were taken, once each."""

    def __init__(self, operation, first, done):
        self.operation, self.first, self.done = operation, first, done
        self.chunks = operation.chunks

    def ready(self, chunks):
        return self.operation.ready(chunks)

    def bring(self, chunks, packets):
        self.operation.bring(chunks, packets)

    def take(self, chunks, packets):
        new = set((chunks + self.first).tolist())
        assert len(new) == len(chunks)
        assert not new & self.done, "a sum was taken twice"
        self.done |= new
        self.operation.take(chunks, packets)


class Worker:
    """A stream, and the operations that it carries out one after the other."""

    def __init__(self, index, slots, operations, mode=LOCAL, number=1):
        self.stream = Stream(
            slots=slots, elements=ELEMENTS, worker=index, number=number
        )
        self.todo, self.done, self.first = list(operations), set(), 0
        self.mode = mode

    @property
    def finished(self):
        return self.stream.finished and not self.todo

    def due(self, now):
        while self.stream.finished and self.todo:
            operation = self.todo.pop(0)
            recorded = Recorded(operation, self.first, self.done)
            self.first += operation.chunks
            self.stream.begin(recorded, now, mode=self.mode)
        return self.stream.due(now)


@dataclass
class Net:
    """*workers* by job number; letters are (address, row)."""

    workers: dict
    now: float = 0.0
    letters: list = field(default_factory=list)
    archive: list = field(default_factory=list)

    def everybody(self):
        return [worker for workers in self.workers.values() for worker in workers]

    @property
    def finished(self):
        return all(worker.finished for worker in self.everybody())

    def post(self, address, packets):
        for row in range(len(packets)):
            letter = (address, packets[row : row + 1].copy())
            self.letters.append(letter)
            self.archive.append(letter)

    def post_all(self, job, out):
        for row, to in enumerate(out.to.tolist()):
            packet = out.packets[row : row + 1]
            packet["header"]["job"] = job
            everyone = range(len(self.workers[job])) if to == EVERYONE else [to]
            for worker in everyone:
                self.post(("next", job) if to == NEXT else (job, worker), packet)

    def let_go(self):
        """Everybody sends what is due."""
        for job, workers in self.workers.items():
            for worker in workers:
                self.post(("switch", job), worker.due(self.now))

    def wait(self):
        """Time passes until somebody sends again."""
        deadline = min(worker.stream.deadline for worker in self.everybody())
        if np.isfinite(deadline):
            self.now = max(self.now, deadline)

    def deliver(self, letter):
        (what, who), packet = letter
        packet = packet.copy()
        if what in self.workers:
            self.workers[what][who].stream.take(packet, self.now)
        else:
            getattr(self, f"to_{what}")(who, packet)
        self.check()
        self.let_go()

    def check(self):
        """What holds at any time."""

    def play(self, fates):
        self.let_go()
        for fate in fates:
            what, which = fate % 8, fate // 8
            if what == 7 and self.archive:
                self.deliver(self.archive[which % len(self.archive)])
            elif what == 6 or not self.letters:
                self.wait()
                self.let_go()
            elif what == 5:
                self.letters.pop(which % len(self.letters))
            elif what == 4:
                self.deliver(self.letters[which % len(self.letters)])
            else:
                self.deliver(self.letters.pop(which % len(self.letters)))

    def settle(self):
        self.let_go()
        for _ in range(MOST_TURNS):
            if self.finished:
                return
            if self.letters:
                self.deliver(self.letters.pop(0))
            else:
                self.wait()
                self.let_go()
        raise AssertionError("somebody is stuck")


class Rack(Net):
    """One job at `Slots`; so many *chunks* go to `Inbox`es of *agents* that take turns."""

    def __init__(self, streams, slots, chunks=0, agents=1):
        super().__init__({1: streams})
        self.memory = Memory.of(slots, ELEMENTS)
        self.slots = Slots(self.memory, len(streams))
        self.came = {}
        self.inboxes = [
            Inbox(slots=slots, elements=ELEMENTS, number=1, turn=(agent, agents))
            for agent in range(agents)
        ]
        for inbox in self.inboxes:
            inbox.begin(chunks, self.take)

    def take(self, chunks, packets):
        for row, chunk in enumerate(chunks.tolist()):
            assert chunk not in self.came, "a sum was taken twice"
            elements = packets["header"]["elements"][row]
            self.came[chunk] = packets["values"][row, :elements].copy()

    def to_switch(self, job, packet):
        self.post_all(job, self.slots.take(packet))

    def to_next(self, job, packet):
        agent = int(packet["header"]["slot"][0]) % len(self.inboxes)
        self.post(("switch", job), self.inboxes[agent].take(packet))

    def check(self):
        """Nothing is freed early: what a slot no longer holds was taken by all whom it was
        for, and is acknowledged where it left the rack."""
        count = self.slots.slots
        for slot in range(count):
            for version in (0, 1):
                number = int(self.memory.rounds[slot, version])
                forwarded = self.memory.flags[slot, version] != LOCAL
                chunk = number * count + slot
                if number >= 0 and forwarded and self.memory.over[slot, version]:
                    assert chunk in self.came, "freed before it was acknowledged"
                before = chunk - 2 * count
                for worker in self.workers[1]:
                    if number >= 2 and worker.mode != Flag.FORWARD:
                        assert before in worker.done, "overwritten before all had it"


class Contended(Net):
    """Several jobs at a `BestEffort` switch, each with a server behind it."""

    def __init__(self, workers, slots, places):
        super().__init__(workers)
        self.switch = BestEffort(places, ELEMENTS)
        self.servers = {
            job: FallbackServer(slots, ELEMENTS, len(streams))
            for job, streams in workers.items()
        }

    def to_switch(self, job, packet):
        expected = np.array([all_bits(len(self.workers[job]))])
        out = self.switch.take(job, expected, packet)
        self.post_all(job, out)

    def to_next(self, job, packet):
        answers = self.servers[job].take(packet)
        answers["header"]["job"] = job
        assert (answers["header"]["kind"] == Kind.PARAMETERS).all()
        self.post(("switch", job), answers)
