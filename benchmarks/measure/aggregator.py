"""Payload bits a second of the aggregator, on one core.

    python -m benchmarks.measure.aggregator                 # 4 workers over loopback, two runs: stored
    python -m benchmarks.measure.aggregator --workers 4 --seconds 5 --json

The aggregator is a process on one core; the workers are processes on the others (on the same
one, if there is no other). Each sums 8 MB of int32 again and again. *By the clock*: payload that
a worker sends, and receives, a second. *A core*: the same for all workers together, by the
aggregator's own processor time: what it would carry if workers were no bottleneck.
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.papers.results import Results
from paceline.collectives.in_network.joining import JobConfig, JoinRing
from paceline.collectives.in_network.server import AggregatorServer
from paceline.collectives.in_network.topology import one_switch

TOKEN, HOST, RACK = "a token of benchmarks", "127.0.0.1", 0
MEGABYTES = 8
RUNS = 2
RESULTS = Path(__file__).parents[1] / "results" / "aggregator.jsonl"
WALL, CORE = "Gbit/s a worker by the clock", "Gbit/s into one aggregator core"
GIGA = 1e9


def cores():
    """The aggregator's, and the workers'."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def aggregate(port, stop):
    os.sched_setaffinity(0, cores()[0])
    aggregator = AggregatorServer(HOST, 0, token=TOKEN)
    port.send(aggregator.address)
    before = cpu_seconds()
    aggregator.run(stop.fileno())
    port.send((cpu_seconds() - before, aggregator.summary()))
    aggregator.close()


def work(address, worker, options, pipe, results):
    os.sched_setaffinity(0, cores()[1])

    def exchange(words):
        pipe.send(words)
        return pipe.recv()

    job = JobConfig(worker, {RACK: address}, "benchmark", TOKEN)
    session = JoinRing(one_switch(options.workers, RACK), job).join(exchange)
    values = np.ones(MEGABYTES * 250_000, np.int32)
    keep_on = np.zeros(1, np.int32)
    session.all_reduce(values)  # warm
    exchange(b"")
    begun, rounds, cpu = time.monotonic(), 0, cpu_seconds()
    while True:
        values[:] = 1
        session.all_reduce(values)
        rounds += 1
        keep_on[0] = worker == 0 and time.monotonic() - begun < options.seconds
        session.all_reduce(keep_on)
        if not keep_on[0]:
            break
    seconds = time.monotonic() - begun
    assert (values == options.workers).all()
    sent = rounds * values.nbytes
    results.put((sent * 8 / seconds, (cpu_seconds() - cpu) / sent * GIGA))
    exchange(b"")
    session.close(well=True)


def measured(options):
    context = multiprocessing.get_context("spawn")
    stop, stopper = context.Pipe()
    port, told = context.Pipe()
    aggregator = context.Process(target=aggregate, args=(told, stop))
    aggregator.start()
    address = port.recv()
    results = context.Queue()
    pipes = [context.Pipe() for _ in range(options.workers)]
    workers = [
        context.Process(target=work, args=(address, worker, options, end, results))
        for worker, (_, end) in enumerate(pipes)
    ]
    for process in workers:
        process.start()
    for _ in range(5):  # the exchanges of all workers
        words = [pipe.recv() for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send(words)
    found = [results.get() for _ in workers]
    for process in workers:
        process.join()
    stopper.send(b"stop")
    cpu, counts = port.recv()
    aggregator.join()
    taken = counts["bytes in"]
    return {
        WALL: sum(rate for rate, _ in found) / len(found) / GIGA,
        CORE: 8 * taken / cpu / GIGA,
        "chunks a second and core": counts["contributions"] / cpu,
        "aggregator's processor seconds per GB": cpu / taken * GIGA,
        "a worker's processor seconds per GB": sum(cost for _, cost in found)
        / len(found),
        "load before": options.load,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = Results(RESULTS)
    results.command = (
        f"python -m benchmarks.measure.aggregator --workers {options.workers}"
    )
    for run in range(1, RUNS + 1):
        options.load = os.getloadavg()[0]
        begin = time.monotonic()
        found = measured(options)
        figures = {
            f"{row(options.workers, run)}: {name}": found[name] for name in found
        }
        results.put(figures, "", time.monotonic() - begin)
        if options.json:
            print(json.dumps(found))
            continue
        for name, value in found.items():
            print(f"{name:40} {value:,.3f}")


def row(workers, run):
    return f"{workers} workers, run {run}"


def rates_table():
    """Stored rates of each run with 4 workers."""
    results = Results(RESULTS, measures=False)
    for run in range(1, RUNS + 1):
        yield {
            f"4 workers, sums of {MEGABYTES} MB": f"run {run}",
            "Gbit/s a worker, wall time": f"{results.stored(f'{row(4, run)}: {WALL}'):.1f}",
            "Gbit/s of all workers, aggregator's processor time": f"{results.stored(f'{row(4, run)}: {CORE}'):.1f}",
        }


if __name__ == "__main__":
    main()
