"""Several switches, servers and jobs, over a network that a test steers: see
`tests.collectives.in_network.net`. Everybody is told what `collectives.in_network.atp_routes` says."""

import numpy as np
from hypothesis import strategies as st

from paceline.collectives.in_network.atp_routes import at_server, at_switch, at_worker
from paceline.collectives.in_network.atp_tree import Server, Ways, beside_workers
from paceline.collectives.in_network.best_effort import BestEffort, FallbackServer
from paceline.collectives.in_network.packets import NOBODY
from paceline.collectives.in_network.slots import EVERYONE, NEXT
from tests.collectives.in_network.net import ELEMENTS, Net


@st.composite
def layouts(draw, racks=3, workers=6):
    """Random `Ways`: none, some or all racks aggregate; dedicated servers, or one beside each
    worker."""
    count = draw(st.integers(1, racks))
    places = st.lists(st.integers(0, count - 1), min_size=1, max_size=workers)
    of = tuple(draw(places))
    aggregating = tuple(draw(st.sets(st.integers(0, count - 1))))
    servers = beside_workers(of)
    if draw(st.booleans()):
        homes = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2))
        servers = tuple(Server(home, None, k) for k, home in enumerate(homes))
    return Ways(of, aggregating, servers)


class Tree(Net):
    """*workers* and *ways* by job; each rack's switch has so many *places* for all."""

    def __init__(self, workers, ways, slots, places):
        super().__init__(workers)
        self.ways = ways
        racks = {rack for of in ways.values() for rack in of.merging}
        self.switches = {rack: BestEffort(places, ELEMENTS) for rack in racks}
        self.servers = {
            (job, part): FallbackServer(slots, ELEMENTS, len(of.racks))
            for job, of in ways.items()
            for part in range(len(of.servers))
        }

    def letter(self, job, end):
        return (job, end.number) if end.kind == "worker" else (end.kind, (job, end[1]))

    def let_go(self):
        for job, workers in self.workers.items():
            for rank, worker in enumerate(workers):
                targets = at_worker(self.ways[job], rank)
                packets = worker.due(self.now)
                for row in range(len(packets)):
                    self.send(job, targets, packets[row : row + 1])

    def send(self, job, targets, packet):
        slot = int(packet["header"]["slot"][0])
        self.post(self.letter(job, targets[slot % len(targets)]), packet)

    def to_switch(self, which, packet):
        job, rack = which
        told = at_switch(self.ways[job], rack)
        expected = np.array(told.expected, np.uint64)
        out = self.switches[rack].take(job, expected, packet)
        for row, to in enumerate(out.to.tolist()):
            one = out.packets[row : row + 1]
            one["header"]["job"] = job
            if to == NEXT:
                self.send(job, told.next, one)
                continue
            turn = int(one["header"]["slot"][0]) % len(expected)
            for end, bits in self.ways_down(job, told).items():
                whom = told.expected[turn] if to == EVERYONE else 1 << to
                if bits & whom:
                    self.post(end, one)

    def ways_down(self, job, told):
        down = {
            (job, rank): 1 << rank
            for rank in range(len(self.workers[job]))
            if told.here >> rank & 1
        }
        return down | {self.letter(job, end): bits for bits, end in told.routes}

    def to_server(self, which, packet):
        job, part = which
        answers = self.servers[which].take(packet)
        for row in range(len(answers)):
            one = answers[row : row + 1]
            one["header"]["job"] = job
            worker = int(one["header"]["worker"][0])
            for bits, end in at_server(self.ways[job], part):
                if worker == NOBODY or bits >> worker & 1:
                    self.post(self.letter(job, end), one)
