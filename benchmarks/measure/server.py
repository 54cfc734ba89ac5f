"""A parameter server over loopback: what it moves, how long a step takes, what it holds.

    python -m benchmarks.measure.server throughput                       # shared memory, then sockets
    python -m benchmarks.measure.server throughput --workers 4 --megabytes 100 --steps 10 --json
    python -m benchmarks.measure.server step                             # 2 and 4 processes
    python -m benchmarks.measure.server step --processes 2 --pairs 60
    python -m benchmarks.measure.server memory

- *throughput*: each of 4 workers pushes 100 MB a step in buckets of 8 MB; the server adds them up in
  rank order and answers with the sum; every worker waits for all of it. Both directions are summed: a
  step moves workers x 100 MB x 2. The first steps warm up and do not count. CPU seconds are those of
  all processes, in user and kernel, and of the server alone; the peak memory is above what it had
  before the first message. Run on an idle machine, workers take its cores too.
- *step*: bsp over a server against PyTorch DDP, 25 MB. The model has 16 equal layers and nothing to
  compute: all that is compared is moving and adding up. The server is a process of its own, beside
  rank 0. Sides take turns in short blocks of steps in one job (see ddp_over_loopback.py).
- *memory*: peak resident memory of the server's process, less what it had when it was idle, with 4
  workers and a model of 100 MB. The bound: parameters + optimizer state + one accumulator + one bucket
  per worker each way, and n - 1 models more where sums go in rank order or a round waits for all its
  gradients.
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
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from benchmarks.measure import ddp_over_loopback, stored
from benchmarks.measure.harness import ddp, example, on_processes, ours
from paceline.interfaces import Reply, Service, Work
from paceline.interfaces.server_messages import Reduce, Reduced
from paceline.parameter_server.process.host import ServerHost
from paceline.records import StepRecorder
from paceline.transport.connection import ServerConnection
from paceline.transport.listener import ServerListener
from paceline.transport.shared_memory import SWITCH

# ---- throughput ----

MODES = {
    "shared memory": {"PACELINE_SECRET": "", SWITCH: "1"},
    "sockets": {"PACELINE_SECRET": "", SWITCH: "0"},
    "sockets, encrypted": {"PACELINE_SECRET": secrets.token_hex(32), SWITCH: "0"},
}
"""How payloads travel, with the environment for it. In shared memory nothing is encrypted."""

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


def run_server(options):
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


def run_worker(options):
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


def measure_throughput(options, mode):
    environment = {**os.environ, **MODES[mode], "OMP_NUM_THREADS": "1"}
    token = secrets.token_hex(8)
    shared = [*sys.argv[1:], "--token", token]

    def start(*role):
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measure.server", *shared, *role],
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
        "mode": mode,
        "Gbit/s": moved * 8 / statistics.median(seconds) / 1e9,
        "best Gbit/s": moved * 8 / min(seconds) / 1e9,
        "CPU s/GB": total / (moved * options.steps / 1e9),
        "server CPU s/GB": end["cpu"] / (moved * options.steps / 1e9),
        "server peak MB": end["peak"] / 1e6,
    }


# ---- a step ----

METHODS = (
    "bsp:collective=parameter-server,buckets=wfbp",
    "bsp:collective=parameter-server,buckets=ddp",
)


def make_layers():
    model = example("layers").Layers(16, 25.0, 0.0, 0.0)
    x = torch.zeros(())
    return model, lambda model: (model(x) - 1.0) ** 2


def compare_steps(method, pairs, steps):
    return ddp_over_loopback.compare(
        f"{dist.get_world_size()} processes, {method}",
        make_layers,
        ours(method=method),
        ddp(),
        pairs,
        steps,
        warm_up=5,
    )


# ---- memory ----

MEGABYTES, LAYERS, STEPS = 100.0, 12, 5
CASES = {
    # spec: models held by parameters and momentum, models held by waiting gradients
    "bsp:collective=parameter-server,buckets=wfbp": (0, 1),
    "asp:buckets=wfbp": (2, 0),
    "backup:buckets=wfbp": (2, 1),
}


def resident(process, field):
    text = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def child_server():
    """The server that this worker started last."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if b"paceline.parameter_server.process" in words and int(parent) == os.getpid():
            found.append(int(folder.name))
    return max(found)


def measure_memory(method):
    """On rank 0: the server's peak above idle, and its bound, in megabytes."""
    held, waiting = CASES[method]
    torch.manual_seed(0)
    model = example("layers").Layers(LAYERS, MEGABYTES, 0.0, 0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = paceline.distribute(model, sgd, method=method)
    workers, rank = dist.get_world_size(), dist.get_rank()
    before = server = 0
    found = None
    if rank == 0:
        server = child_server()
        before = resident(server, "VmRSS")
        if held:
            before -= int(1e6 * MEGABYTES)  # its parameters were loaded by now
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((model(torch.zeros(())) - 1.0) ** 2).backward()
        optimizer.step()
    if rank == 0:
        peak = (resident(server, "VmHWM") - before) / 1e6
        bucket = MEGABYTES / LAYERS
        bound = held * MEGABYTES + MEGABYTES * (held == 0) + 2 * workers * bucket
        bound += waiting * (workers - 1) * MEGABYTES
        print(f"| {method} | {peak:.0f} MB | {bound:.0f} MB |", flush=True)
        found = {"above idle": peak, "bound": bound}
    optimizer.finish()
    return found


# ---- the command ----

UNITS = {
    "Gbit/s": "Gbit/s",
    "best Gbit/s": "Gbit/s",
    "CPU s/GB": "s/GB",
    "server CPU s/GB": "s/GB",
    "server peak MB": "MB",
}
"""Figures of *throughput*."""


def throughput(options):
    if options.role:
        (run_server if options.role == "server" else run_worker)(options)
        return
    with stored.Store("server throughput", options.store) as store:
        for mode in MODES:
            if options.mode in (None, mode):
                row = measure_throughput(options, mode)
                for name, unit in UNITS.items():
                    store.add(f"{mode}, {name}", row[name], unit)
                if options.json:
                    print(json.dumps(row))
                else:
                    print(
                        "  ".join(
                            f"{k} {v:.2f}" if k != "mode" else v for k, v in row.items()
                        )
                    )


def step(options):
    with stored.Store("server step", options.store) as store:
        for count in options.processes:
            for method in options.method:
                found = on_processes(
                    count, compare_steps, method, options.pairs, options.steps
                )
                ddp_over_loopback.keep(store, f"{count} processes, {method}", found)


def memory(options):
    print("| method | above idle | bound |\n|---|---|---|", flush=True)
    with stored.Store("server memory", options.store) as store:
        for method in options.method:  # a job each: a process keeps its peak
            for name, value in on_processes(4, measure_memory, method).items():
                store.add(f"{method}, {name}", value, "MB")


def table():
    """Rows of the table of docs: what, figure, command."""
    command = "`python -m benchmarks.measure.{}`"
    moved = stored.Figures("server throughput")
    yield [
        f"throughput of a server with 4 workers on one machine, both directions summed: {'; '.join(MODES)}",
        "; ".join(moved.text(f"{mode}, Gbit/s", ".0f") for mode in MODES) + " Gbit/s",
        command.format("server throughput"),
    ]
    steps = stored.Figures("server step")
    for count in (2, 4):
        ratios = [
            one
            for method in METHODS
            for one in steps.runs(f"{count} processes, {method}, ratio")
        ]
        yield [
            "step of `bsp` over such a server, divided by PyTorch DDP's, 25 MB of gradients, "
            f"{count} processes, least and largest of two bucket rules",
            stored.span(ratios, ".2f"),
            command.format("server step"),
        ]
    yield [
        "processor seconds per GB of 4 workers on the server's machine that push and pull 100 MB in "
        f"pieces of 8 MB: {'; '.join(MODES)}",
        "; ".join(moved.text(f"{mode}, CPU s/GB", ".1f") for mode in MODES),
        command.format("server throughput"),
    ]
    held = stored.Figures("server memory")
    bsp, asp, backup = (held.text(f"{name}, above idle", ".0f") for name in CASES)
    yield [
        "server memory above idle, 4 workers on its machine, a model of 100 MB: `asp` with momentum; "
        "`bsp`; `backup`",
        f"{asp}; {bsp}; {backup} MB",
        command.format("server memory"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_subparsers(required=True)
    one = what.add_parser("throughput")
    one.set_defaults(run=throughput)
    one.add_argument("--workers", type=int, default=4)
    one.add_argument("--megabytes", type=float, default=100)
    one.add_argument("--bucket", type=float, default=8, help="megabytes")
    one.add_argument("--steps", type=int, default=10)
    one.add_argument("--mode", choices=list(MODES))
    one.add_argument("--json", action="store_true")
    for hidden in ("role", "token"):
        one.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    for hidden in ("rank", "port"):
        one.add_argument(f"--{hidden}", type=int, help=argparse.SUPPRESS)
    one = what.add_parser("step")
    one.set_defaults(run=step)
    one.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    one.add_argument("--method", nargs="+", default=METHODS)
    one.add_argument("--pairs", type=int, default=40)
    one.add_argument("--steps", type=int, default=5, help="steps a block")
    one = what.add_parser("memory")
    one.set_defaults(run=memory)
    one.add_argument("--method", nargs="+", choices=list(CASES), default=list(CASES))
    for one in what.choices.values():
        stored.add_option(one)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
