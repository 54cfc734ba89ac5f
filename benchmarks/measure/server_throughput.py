"""Gbit/s through one parameter server over loopback, in real processes.

    python -m benchmarks.measure.server_throughput                  # plain, then CURVE
    python -m benchmarks.measure.server_throughput --workers 4 --megabytes 100 --steps 10 --json

Each of 4 workers pushes 100 MB a step in buckets of 8 MB; the server adds them up in rank
order and answers with the sum; every worker waits for all of it. Both directions are
summed: a step moves workers x 100 MB x 2. The first steps warm up and do not count. CPU
seconds are those of all processes, in user and kernel, and of the server alone; the peak memory is above
what it had before the first message. Run on an idle machine, workers take its cores too.
"""

import argparse
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import time

import torch

from paceline.interfaces import Reply, Service, Work
from paceline.interfaces.server_messages import Reduce, Reduced
from paceline.parameter_server.process.host import ServerHost
from paceline.records import StepRecorder
from paceline.transport.connection import ServerConnection
from paceline.transport.listener import ServerListener

WARM_UP = 2


class Adder(Service):
    """Sums of all workers' payloads, in rank order; what comes early is kept."""

    def __init__(self, workers):
        self.workers = workers
        self.cpu_before = 0.0  # when the warm-up ended
        self.sums = {}  # by number: total, how many ranks are in it, who waits, early ones

    def on_request(self, sender, message, payload, now):
        key = sender.channel, message.number
        total, count, waiting, early = self.sums.pop(key, (None, 0, [], {}))
        early[sender.worker] = payload
        waiting.append(sender)
        while count in early:
            part = early.pop(count)
            total = part if total is None else total.add_(part)
            count += 1
        if count == self.workers:
            if message.number == -1 - WARM_UP:
                self.cpu_before = cpu_seconds()
            return [Reply(to, Reduced(), total) for to in waiting]
        self.sums[key] = total, count, waiting, early
        return []

    def on_worker_lost(self, worker, incarnation, now):
        raise RuntimeError(f"worker {worker} died")

    def next_deadline(self):
        return None

    def on_timer(self, now):
        return []

    def take_work(self):
        return Work()


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(options):
    torch.set_num_threads(1)
    adder = Adder(options.workers)
    listener = ServerListener(workers=options.workers, token=options.token)
    host = ServerHost(listener)
    host.add(adder)
    print(listener.port, flush=True)
    before = peak_bytes()
    for _ in host.serve(sys.stdin.fileno()):
        pass
    host.close()
    cpu = cpu_seconds() - adder.cpu_before
    print(json.dumps({"cpu": cpu, "peak": peak_bytes() - before}), flush=True)


def work(options):
    torch.set_num_threads(1)
    rank = options.rank
    recorder = StepRecorder(rank, time.perf_counter)
    server = ServerConnection(
        *("server 0", "127.0.0.1", options.port),
        worker=rank,
        token=options.token,
        recorder=recorder,
    )
    elements = int(options.megabytes * 1e6 / 4)
    buffer = torch.empty(elements)
    buckets = buffer.split(int(options.bucket * 1e6 / 4))
    cpu, starts = 0.0, []
    for step in range(WARM_UP + options.steps):
        buffer.fill_(rank + 1.0)
        barrier = Reduce(channel="", number=-1 - step, operation="sum")
        server.request(barrier, torch.zeros(1)).wait()
        if step == WARM_UP:
            cpu = cpu_seconds()
        starts.append(time.perf_counter())
        pending_replies = [
            server.request(
                Reduce(channel="", number=step * len(buckets) + i, operation="sum"),
                *(bucket, bucket),
            )
            for i, bucket in enumerate(buckets)
        ]
        for pending_reply in pending_replies:
            pending_reply.wait()
        starts[-1] = time.perf_counter() - starts[-1]
        expected = options.workers * (options.workers + 1) / 2
        assert buffer[0] == expected, buffer[0]
        assert buffer[-1] == expected, buffer[-1]
    cpu = cpu_seconds() - cpu
    server.close()
    print(json.dumps({"seconds": starts[WARM_UP:], "cpu": cpu}), flush=True)


def measure(options, secret):
    environment = {**os.environ, "PACELINE_SECRET": secret, "OMP_NUM_THREADS": "1"}
    token = secrets.token_hex(8)
    shared = ["--token", token, *sys.argv[1:]]

    def start(*role):
        return subprocess.Popen(
            [sys.executable, __file__, *role, *shared],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    server = start("--role", "server")
    port = server.stdout.readline().strip()
    workers = [
        start("--role", "worker", "--rank", str(rank), "--port", port)
        for rank in range(options.workers)
    ]
    reports = [json.loads(worker.communicate()[0]) for worker in workers]
    end = json.loads(server.communicate()[0])
    # A step has ended when its slowest worker has it.
    seconds = [
        max(times) for times in zip(*(r["seconds"] for r in reports), strict=True)
    ]
    moved = 2 * options.workers * options.megabytes * 1e6
    total = end["cpu"] + sum(report["cpu"] for report in reports)
    return {
        "mode": "CURVE" if secret else "plain",
        "Gbit/s": moved * 8 / statistics.median(seconds) / 1e9,
        "best Gbit/s": moved * 8 / min(seconds) / 1e9,
        "CPU s/GB": total / (moved * options.steps / 1e9),
        "server CPU s/GB": end["cpu"] / (moved * options.steps / 1e9),
        "server peak MB": end["peak"] / 1e6,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--bucket", type=float, default=8, help="megabytes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mode", choices=["plain", "CURVE"])
    parser.add_argument("--json", action="store_true")
    for hidden in ("role", "token"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    for hidden in ("rank", "port"):
        parser.add_argument(f"--{hidden}", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        (serve if options.role == "server" else work)(options)
        return
    for mode, secret in (("plain", ""), ("CURVE", secrets.token_hex(32))):
        if options.mode in (None, mode):
            row = measure(options, secret)
            if options.json:
                print(json.dumps(row))
            else:
                print(
                    "  ".join(
                        f"{k} {v:.2f}" if k != "mode" else v for k, v in row.items()
                    )
                )


if __name__ == "__main__":
    main()
