"""What gloo's event loops cost that take cores from threads which they wait for.

    python -m benchmarks.measure.gloo_loops
    python -m benchmarks.measure.gloo_loops --workers 4 --turns 200 --json

All sides live in one job of processes on this machine and take turns: in one, the loops are scheduled as all
threads are; in the other under ``SCHED_BATCH``, as paceline sets them (`keep_gloo_from_spinning`).
*small*: eight all-reduces of 40 bytes, one after the other. *beside*: eight that are issued while a worker
computes for 2.4 ms, of the sizes of `examples/digits.py`'s tensors. Each turn begins after a pause, or computing,
of some milliseconds, as a step has them. Means, in milliseconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SIDES = {"as other threads": os.SCHED_OTHER, "SCHED_BATCH": os.SCHED_BATCH}
TENSORS = (40, 5120, 512, 524288, 73728, 256, 1152, 128)
PAUSE, COMPUTES, OVERLAPS = 0.006, 0.003, 0.0024


def loops():
    """The numbers of this process's event loops."""
    threads = Path("/proc/self/task").glob("*")
    return [
        int(thread.name)
        for thread in threads
        if (thread / "comm").read_bytes() == b"gloo_tcp_loop\n"
    ]


def compute(seconds, square):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        square @ square


def small(buffers, square):
    time.sleep(PAUSE)
    start = time.perf_counter()
    for _ in TENSORS:
        dist.all_reduce(buffers[0])
    return time.perf_counter() - start


def beside(buffers, square):
    compute(COMPUTES, square)
    start = time.perf_counter()
    works = []
    for buffer in buffers:
        compute(OVERLAPS / len(buffers), square)
        works.append(dist.all_reduce(buffer, async_op=True))
    for work in works:
        work.wait()
    return time.perf_counter() - start


def worker(turns):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    buffers = [torch.zeros(size // 4) for size in TENSORS]
    square = torch.randn(256, 256)
    dist.all_reduce(buffers[0])
    threads = loops()
    taken = {(what, side): [] for what in (small, beside) for side in SIDES}
    for _ in range(turns):
        for (what, side), times in taken.items():
            for thread in threads:
                os.sched_setscheduler(thread, SIDES[side], os.sched_param(0))
            dist.barrier()
            times.append(what(buffers, square))
    if dist.get_rank() == 0:
        found = {
            f"{what.__name__}, {side}": 1e3 * statistics.mean(times)
            for (what, side), times in taken.items()
        }
        print(json.dumps(found))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args.turns)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.workers}", __file__, f"--turns={args.turns}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if args.json:
        print(json.dumps(found))
        return
    for side, milliseconds in found.items():
        print(f"{side:<32}{milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
