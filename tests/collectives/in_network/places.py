"""Where the tests of sockets have their aggregator: on loopback."""

import contextlib
import os
import threading

import numpy as np

from paceline.collectives.in_network.client import AggregatorClient
from paceline.collectives.in_network.server import UserSpaceAggregator
from tests.support.hanging import SECONDS

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
    running = staticmethod(running)

    def joining(self, aggregator, worker, job="job", workers=WORKERS, **options):
        return AggregatorClient(
            self.host,
            aggregator.port,
            job=job,
            worker=worker,
            workers=workers,
            token=options.pop("token", TOKEN),
            **options,
        )


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
