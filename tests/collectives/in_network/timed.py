"""Machines of a ring of racks over links that have rates and queues, in simulated time.

Links pass datagrams on one after the other, and lose what finds a queue full; a host deals with
what has come in turns, which take time. Nothing is random. So what windows, timers and queues make
of a link is known to the microsecond, whatever else this machine does.
"""

import heapq
import itertools

import numpy as np

from paceline.collectives.in_network.forwarding import Inbox, freed_alone, sent_alone
from paceline.collectives.in_network.packets import (
    IP_BYTES,
    UDP_BYTES,
    elements_for,
    sizes,
)
from paceline.collectives.in_network.slots import EVERYONE, NEXT, Memory, Slots
from paceline.collectives.in_network.stream import Stream
from paceline.collectives.in_network.topology import (
    STAGGER_BYTES,
    RingSum,
    Stages,
    datagrams_of,
)
from paceline.runtimes.emulated.network_plan import JUMBO_MTU
from paceline.runtimes.emulated.shaping import Bucket, wire_rate
from paceline.runtimes.emulated.switchboard import ETHERNET_HEADER

SLOTS = 128
TURN_SECONDS, DATAGRAM_SECONDS = 1e-4, 1e-4
"""Of a host: for each turn, and for each datagram of it."""


class Link:
    """One direction of a wire, of so many bytes of payload a second, as emulated ones are."""

    def __init__(self, rate):
        bucket = Bucket.of(wire_rate(rate), JUMBO_MTU + ETHERNET_HEADER)
        self.rate, self.limit = bucket.rate, bucket.limit
        self.free_at, self.lost = 0.0, 0

    def leaves(self, now, size):
        """When a datagram of so many bytes has left; None where it is lost."""
        size += IP_BYTES + UDP_BYTES + ETHERNET_HEADER
        start = max(now, self.free_at)
        if (start - now) * self.rate + size > self.limit:
            self.lost += 1
            return None
        self.free_at = start + size / self.rate
        return self.free_at


class Host:
    """Something that takes datagrams in turns. *rate*: of its link, if that is ever the limit."""

    def __init__(self, net, rate=None):
        self.net, self.links = net, rate and (Link(rate), Link(rate))
        self._came, self._planned, self._busy_until = {}, np.inf, 0.0

    def post(self, to, port, packets):
        """Each by itself, by this host's link and then the other's."""
        for row, size in enumerate(sizes(packets).tolist()):
            packet, left = packets[row : row + 1].copy(), self.net.now
            if self.links:
                left = self.links[0].leaves(self.net.now, size)
            if left is not None:
                self.net.at(left, to.enters, port, packet, size)

    def enters(self, port, packet, size):
        left = self.links[1].leaves(self.net.now, size) if self.links else self.net.now
        if left is not None:
            self.net.at(left, self._arrives, port, packet)

    def _arrives(self, port, packet):
        self._came.setdefault(port, []).append(packet)
        self.wake(self.net.now)

    def wake(self, when):
        """A turn is to begin then, or before."""
        when = max(when, self._busy_until)
        if when < self._planned:
            self._planned = when
            self.net.at(when, self._begin, when)

    def _begin(self, planned):
        if planned == self._planned:
            count = sum(map(len, self._came.values()))
            self._busy_until = self.net.now + TURN_SECONDS + DATAGRAM_SECONDS * count
            self.net.at(self._busy_until, self._turn)

    def _turn(self):
        self._planned = np.inf
        came, self._came = self._came, {}
        self.take({port: np.concatenate(packets) for port, packets in came.items()})
        if self._came:
            self.wake(self.net.now)


class Switch(Host):
    """A rack's aggregator; *agents*: who takes its sums, in turn."""

    def __init__(self, net, count):
        super().__init__(net)
        self.slots = Slots(Memory.of(SLOTS, net.elements), count)

    def take(self, came):
        out = self.slots.take(came["switch"])
        out.packets["header"]["job"] = 1
        for row, to in enumerate(out.to.tolist()):
            packet = out.packets[row : row + 1]
            if to == NEXT:
                slot = int(packet["header"]["slot"][0])
                self.post(self.agents[slot % len(self.agents)], "inbox", packet)
            else:
                for worker in self.workers if to == EVERYONE else [self.workers[to]]:
                    self.post(worker, "stream", packet)


class Worker(Host):
    """One rank: what `RingEnd` and `StreamEnd.run` do. *most*: datagrams of its own that may wait
    to leave it. *ahead*: where its stream goes, in turn; *back*: where answers go."""

    def __init__(self, net, rate, most, group, before, index, count):
        super().__init__(net, rate)
        self.group, self.alone, self.alone_before = group, *before
        self.most, self.leaving, self.done = most, [], True
        self.stream = Stream(slots=SLOTS, elements=net.elements, worker=index, number=1)
        self.inbox = Inbox(
            slots=SLOTS, elements=net.elements, number=1, turn=(index, count)
        )

    def begin(self, values):
        net, groups, at = self.net, self.net.groups, self.group
        count = datagrams_of(len(values), groups, net.elements)
        apart = STAGGER_BYTES // (4 * net.elements)
        stages = Stages(groups, at, count, self.alone, apart)
        before = Stages(groups, (at - 1) % groups, count, self.alone_before, apart)
        turns = self.inbox.turns(before.chunks)
        self.operation = RingSum(values, net.elements, stages, before, turns)
        awaited = before.chunks, self.operation.arrive, before.leaving()
        self._answer(self.inbox.begin(*awaited))
        self.stream.begin(self.operation, net.now, mode=stages.modes())
        self.done = False
        self.wake(net.now)

    def take(self, came):
        if "inbox" in came:
            self._answer(self.inbox.take(came["inbox"]))
        if "stream" in came:
            packets = freed_alone(came["stream"]) if self.alone else came["stream"]
            self.stream.take(packets, self.net.now)
        self._send()
        if not self.done and self.stream.finished and self.inbox.finished:
            self.done = True
            self.operation.finish()

    def _answer(self, packets):
        self.post(self.back, "stream" if self.alone_before else "switch", packets)

    def _send(self):
        now, stream = self.net.now, self.stream
        self.leaving = [left for left in self.leaving if left > now]
        packets = stream.due(now, max(0, self.most - len(self.leaving)))
        for row in range(len(packets)):
            one = packets[row : row + 1]
            slot = int(one["header"]["slot"][0])
            to = self.ahead[slot % len(self.ahead)]
            self.post(
                *(to, "inbox" if self.alone else "switch"),
                sent_alone(one) if self.alone else one,
            )
            self.leaving.append(self.links[0].free_at)
        if stream.held and self.leaving:  # until half of them have left
            self.wake(self.leaving[len(self.leaving) - max(1, self.most // 2)])
        self.wake(stream.deadline + 1e-6)


class TimedRing:
    """The *groups* of a ring, on links of *rate* bytes a second."""

    def __init__(self, ring, rate, most):
        self.now, self._events, self._count = 0.0, [], itertools.count()
        self.elements, self.groups = elements_for(JUMBO_MTU), len(ring)
        self.workers = {}
        switches = [g.rack is not None and Switch(self, len(g.ranks)) for g in ring]
        for at, group in enumerate(ring):
            before = group.rack is None, ring[at - 1].rack is None
            for index, rank in enumerate(group.ranks):
                self.workers[rank] = Worker(
                    self, rate, most, at, before, index, len(group.ranks)
                )
        for at, group in enumerate(ring):
            ranks = ring[(at + 1) % len(ring)].ranks
            after = [self.workers[rank] for rank in ranks]
            mine = [self.workers[rank] for rank in group.ranks]
            if switches[at]:
                switches[at].workers, switches[at].agents = mine, after
            for worker in mine:
                worker.ahead = [switches[at]] if switches[at] else after
                worker.back = switches[at - 1] or self.workers[ring[at - 1].ranks[0]]

    def at(self, when, what, *words):
        if np.isfinite(when):
            event = max(when, self.now), next(self._count), what, words
            heapq.heappush(self._events, event)

    @property
    def lost(self):
        return sum(link.lost for w in self.workers.values() for link in w.links)

    @property
    def repeats(self):
        return sum(w.stream.counts["repeats"] for w in self.workers.values())

    def sum(self, values):
        """*values*, by rank, become their sums; seconds."""
        start = self.now
        for rank, worker in self.workers.items():
            worker.begin(values[rank])
        while not all(worker.done for worker in self.workers.values()):
            self.now, _, what, words = heapq.heappop(self._events)
            what(*words)
        return self.now - start
