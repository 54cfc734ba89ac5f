"""Packets and payload bits a second of the aggregator, on one core.

    python benchmarks/aggregator.py                 # 4 workers over loopback, then no sockets
    python benchmarks/aggregator.py --workers 4 --seconds 5 --json

The aggregator is a process on one core; the workers are processes on the others (on the same
one, if there is no other). Each sums 8 MB of int32 again and again in packets of an
Ethernet's size. *Per worker*: payload that it sends, and receives, a second. *A core*: the same
for all workers together, by the aggregator's own processor time: what it would carry if
workers were no bottleneck. The second part has no sockets: batches of contributions as they come,
checked, added up, signed.
"""

import argparse
import json
import multiprocessing
import os
import resource
import time

import numpy as np

from paceline.collectives.in_network.client import AggregatorClient
from paceline.collectives.in_network.jobs import Jobs, Terms, key_of
from paceline.collectives.in_network.packets import (
    Kind,
    Seal,
    blank,
    elements_for,
    sizes,
)
from paceline.collectives.in_network.server import UserSpaceAggregator

TOKEN, HOST = "a token of benchmarks", "127.0.0.1"
MEGABYTES = 8
GIGA = 1e9


def cores():
    """The aggregator's, and the workers'."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def aggregate(port, stop, options):
    os.sched_setaffinity(0, cores()[0])
    aggregator = UserSpaceAggregator(HOST, 0, token=TOKEN, mtu=options.mtu)
    port.send(aggregator.port)
    before = cpu_seconds()
    aggregator.run(stop.fileno())
    cpu = cpu_seconds() - before
    port.send((cpu, aggregator.summary()))
    aggregator.close()


def work(port, worker, options, start, results):
    os.sched_setaffinity(0, cores()[1])
    client = AggregatorClient(
        HOST,
        port,
        job="benchmark",
        worker=worker,
        workers=options.workers,
        token=TOKEN,
        slots=options.slots,
        mtu=options.mtu,
    )
    values = np.ones(MEGABYTES * 250_000, np.int32)
    keep_on = np.zeros(1, np.int32)
    client.sum_integers(values)  # warm
    start.wait()
    begun, rounds = time.monotonic(), 0
    cpu, chunks = cpu_seconds(), client.counts["chunks"]
    while True:
        values[:] = 1
        client.sum_integers(values)
        rounds += 1
        keep_on[0] = worker == 0 and time.monotonic() - begun < options.seconds
        client.sum_integers(keep_on)
        if not keep_on[0]:
            break
    seconds = time.monotonic() - begun
    assert (values == options.workers).all()
    each = (cpu_seconds() - cpu) / (client.counts["chunks"] - chunks)
    results.put((rounds * values.nbytes * 8 / seconds, dict(client.counts), each))
    client.close()


def measured(options):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stop, stopper = context.Pipe(duplex=False)
    server = context.Process(target=aggregate, args=(theirs, stop, options))
    server.start()
    theirs.close()  # so that its death is noticed
    port, start, results = (
        ours.recv(),
        context.Barrier(options.workers),
        context.Queue(),
    )
    workers = [
        context.Process(target=work, args=(port, w, options, start, results))
        for w in range(options.workers)
    ]
    begun = os.times().elapsed
    for worker in workers:
        worker.start()
    ends = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    wall = os.times().elapsed - begun
    stopper.send(0)
    cpu, counts = ours.recv()
    server.join()
    rate = min(bits for bits, _, _ in ends)
    payload = 32 * elements_for(options.mtu) * counts["contributions"]
    return {
        "workers": options.workers,
        "mtu": options.mtu,
        "slots": options.slots,
        "gbit_per_worker": rate / GIGA,
        "packets_in_per_second": rate
        * options.workers
        / 32
        / elements_for(options.mtu),
        "aggregator_cpu_seconds": cpu,
        "aggregator_microseconds_per_contribution": 1e6 * cpu / counts["contributions"],
        "wall_seconds": wall,
        "gbit_in_per_aggregator_cpu_second": payload / GIGA / cpu,
        "gbit_per_worker_if_a_core_is_full": payload / GIGA / cpu / options.workers,
        "worker_cpu_microseconds_per_chunk": 1e6 * max(each for _, _, each in ends),
        "repeats": sum(counted.get("repeats", 0) for _, counted, _ in ends),
        "load_before": options.load,
        "counts": counts,
    }


def without_sockets(options, batch=256):
    elements = elements_for(options.mtu)
    jobs = Jobs(slots=512, places=1, elements=elements, token=TOKEN)
    terms = Terms(name="x", workers=options.workers, slots=512, elements=elements)
    job = jobs.register(terms, 0)
    packets = blank(batch, elements)
    packets["values"] = 1
    header, seal = packets["header"], Seal(key_of(TOKEN, "x"))
    header["kind"], header["elements"], header["job"] = (
        *(Kind.CONTRIBUTION, elements),
        job.number,
    )
    number = np.arange(batch)
    header["worker"] = number % options.workers
    header["bitmap"] = 1 << (number % options.workers)
    header["slot"] = number // options.workers
    spent = {"signing": 0.0, "taking": 0.0}
    lengths, rounds = sizes(packets), 400
    for turn in range(rounds):
        header["round"] = turn
        begun = time.process_time()
        seal.sign(packets)
        middle = time.process_time()
        ((_, out),) = jobs.take(packets, lengths)
        spent["taking"] += time.process_time() - middle
        spent["signing"] += middle - begun
        assert len(out.to) == batch // options.workers
    each = {name: seconds / rounds / batch for name, seconds in spent.items()}
    return {
        "microseconds_per_contribution": 1e6 * each["taking"],
        "of_which_its_tag": 1e6 * each["signing"],
        "gbit_per_second": 32 * elements / each["taking"] / GIGA,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    found = {"loopback": measured(options), "alone": without_sockets(options)}
    if options.json:
        print(json.dumps(found))
        return
    for part, figures in found.items():
        print(part)
        for name, value in figures.items():
            if not isinstance(value, dict):
                print(f"  {name:36} {value:,.3f}")


if __name__ == "__main__":
    main()
