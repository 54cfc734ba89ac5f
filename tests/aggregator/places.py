"""Where the tests of sockets have their aggregator: on loopback, or in a rack of namespaces."""

import contextlib
import os
import threading

import numpy as np

from paceline.aggregator.client import AggregatorClient
from paceline.aggregator.udp import UserSpaceAggregator
from tests.aggregator import rack as racks
from tests.hanging import SECONDS

TOKEN = "a token of tests"
WORKERS = 4


@contextlib.contextmanager
def served(aggregator):
    """It serves, in a thread."""
    stop, stopper = os.pipe()
    thread = threading.Thread(target=aggregator.run, args=(stop,))
    thread.start()
    try:
        yield aggregator
    finally:
        os.write(stopper, b".")
        thread.join(SECONDS)
        aggregator.close()
        os.close(stop)
        os.close(stopper)


@contextlib.contextmanager
def running(**options):
    """The aggregator of user space, on loopback."""
    aggregator = UserSpaceAggregator("127.0.0.1", 0, token=TOKEN, **options)
    with served(aggregator):
        yield aggregator


class Loopback:
    """Everybody is on this host."""

    host = "127.0.0.1"
    enter = ""
    """What a script does first to be where workers are."""
    running = staticmethod(running)

    def at(self, worker):
        """This thread is where that worker is."""
        return contextlib.nullcontext()

    def address(self, worker):
        return self.host

    def joining(self, aggregator, worker, job="job", workers=WORKERS, **options):
        with self.at(worker):
            return AggregatorClient(
                self.host,
                aggregator.port,
                job=job,
                worker=worker,
                workers=workers,
                token=options.pop("token", TOKEN),
                **options,
            )


class InARack(Loopback):
    """Each worker has a namespace, and so has the aggregator, of that *path*."""

    def __init__(self, rack, path, another=False, interface="eth0"):
        self.rack, self.path, self.interface = rack, path, interface
        self.host = racks.AGGREGATORS[another]
        self.its_own = rack.another if another else rack.aggregator
        self.enter = (
            f"from tests.aggregator.rack import enter\nenter({rack.workers[0]!r})\n"
        )

    def at(self, worker):
        return racks.inside(self.rack.workers[worker % len(self.rack.workers)])

    def address(self, worker):
        return racks.address_of(worker)

    @contextlib.contextmanager
    def running(self, **options):
        with racks.inside(self.its_own):
            if self.path == "sockets":
                aggregator = UserSpaceAggregator(self.host, 0, token=TOKEN, **options)
            else:
                from paceline.aggregator.xdp.aggregator import XdpAggregator

                aggregator = XdpAggregator(
                    self.host, 0, token=TOKEN, interface=self.interface, **options
                )
        with served(aggregator):
            yield aggregator


def lossy(seed, part):
    """Which of so many datagrams get through, where that part is lost."""
    chance = np.random.default_rng(seed)
    return lambda count: chance.random(count) >= part


def together(workers, work):
    """*work* of each worker, in a thread each; their results, or the first error."""
    results, errors = [None] * workers, []

    def run(worker):
        try:
            results[worker] = work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(w,)) for w in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results
