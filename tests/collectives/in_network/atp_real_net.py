"""Aggregators, servers and workers over real sockets on one machine, told what
`collectives.in_network.atp_routes` says."""

import contextlib
import threading

import numpy as np

from paceline.collectives.in_network.atp_routes import at_server, at_switch, at_worker
from paceline.collectives.in_network.atp_server import UdpFallbackServer
from paceline.collectives.in_network.jobs import key_of, number_of
from paceline.collectives.in_network.served import ServedClient
from tests.collectives.in_network.test_server import TOKEN, lossy, running, together
from tests.support.hanging import SECONDS

HOST, ELEMENTS = "127.0.0.1", 358


class Job:
    """One job's ends: `open` them, and `close`."""

    def __init__(self, name, ways, aggregators, slots=8, loss=0.0):
        self.name, self.ways, self.aggregators = name, ways, aggregators
        terms = {
            "workers": len(ways.racks),
            "slots": -(-slots // len(ways.servers)) * len(ways.servers),
            "elements": ELEMENTS,
        }
        signed = {"number": number_of(TOKEN, name), "key": key_of(TOKEN, name)}

        def faulty(number):
            return {"lossy": lossy(number, loss) if loss else None}

        self.servers = [
            UdpFallbackServer(HOST, **signed, **terms, **faulty(100 + part))
            for part in range(len(ways.servers))
        ]
        self.clients = [
            ServedClient(
                HOST,
                job=name,
                token=TOKEN,
                worker=rank,
                servers=len(ways.servers),
                **terms,
                **faulty(rank),
            )
            for rank in range(len(ways.racks))
        ]
        self.threads = [threading.Thread(target=one.run) for one in self.servers]

    def address(self, end):
        if end.kind == "switch":
            return HOST, self.aggregators[end.number].port
        ends = self.servers if end.kind == "server" else self.clients
        return ends[end.number].address

    def open(self):
        for part, server in enumerate(self.servers):
            server.lead(self.routes(at_server(self.ways, part)))
        for thread in self.threads:
            thread.start()
        for rank, client in enumerate(self.clients):
            client.lead([self.address(end) for end in at_worker(self.ways, rank)])
            rack = self.ways.racks[rank]
            if rack in self.ways.merging:
                told = at_switch(self.ways, rack)
                client.register(
                    (HOST, self.aggregators[rack].port),
                    here=told.here,
                    expected=told.expected,
                    behind=[self.address(end) for end in told.next],
                    routes=self.routes(told.routes),
                )

    def routes(self, ways):
        return [(bits, *self.address(end)) for bits, end in ways]

    def sum(self, rank, values):
        self.clients[rank].probe()
        self.clients[rank].sum_integers(values)

    def close(self):
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.stop()
        for thread in self.threads:
            thread.join(SECONDS)


@contextlib.contextmanager
def jobs(layouts, racks, places=64, **options):
    """Jobs of those *layouts* (by name), at one aggregator for each of so many racks."""
    with contextlib.ExitStack() as stack:
        aggregators = [
            stack.enter_context(running(places=places)) for _ in range(racks)
        ]
        made = [
            Job(name, ways, aggregators, **options) for name, ways in layouts.items()
        ]
        for job in made:
            job.open()
        try:
            yield made, aggregators
        finally:
            for job in made:
                job.close()


def sums(made, size, rounds=2):
    """Whether sums of random integers are exact, in all jobs at once."""
    chance = np.random.default_rng(size)
    values = [
        chance.integers(-(2**31), 2**31, (rounds, len(job.clients), size)).astype(
            np.int32
        )
        for job in made
    ]
    wanted = [
        v.sum(axis=1, dtype=np.int64).astype(np.int32)[:, None].repeat(v.shape[1], 1)
        for v in values
    ]
    ends = [(j, rank) for j, job in enumerate(made) for rank in range(len(job.clients))]

    def work(number):
        j, rank = ends[number]
        for one in values[j]:
            made[j].sum(rank, one[rank])

    together(len(ends), work)
    return all((v == w).all() for v, w in zip(values, wanted, strict=True))
