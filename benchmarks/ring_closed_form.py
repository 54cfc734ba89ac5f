"""One bucket, no compute: virtual time against the ring's closed form.

    python benchmarks/ring_closed_form.py

For each number of workers: a step of ``examples/layers.py`` with one bucket and nothing to
compute, and one all-reduce of as many bytes played message by message from a common
start, both over 2(n-1)(latency + bytes/n/bandwidth).
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation

LAYERS = Path(__file__).parent.parent / "examples" / "layers.py"
BYTES, BANDWIDTH, LATENCY = 8_000_000, 1e9 / 8, 50e-6


def step_of_layers(workers):
    command = [sys.executable, "-m", "paceline", "simulate", LAYERS, "--json"]
    command += ["--workers", workers, "--link", "1gbit", "--latency", "50us"]
    command += ["--method", "bsp:buckets=single"]
    command += ["--", "--forward", "0", "--backward", "0", "--megabytes", "8"]
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["step_seconds"]


def played_all_reduce(workers):
    def body(rank):
        dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(BYTES // 4))

    cluster = uniform_cluster(workers, "1gbit", "50us")
    return Simulation(cluster, play=True).run(body).virtual_seconds


def main():
    print("workers  closed form s  layers.py / closed - 1  played / closed - 1")
    for workers in (2, 5, 8, 16):
        closed = 2 * (workers - 1) * (LATENCY + BYTES / workers / BANDWIDTH)
        priced = step_of_layers(workers) / closed - 1
        played = played_all_reduce(workers) / closed - 1
        print(f"{workers:7d}  {closed:13.6f}  {priced:22.1e}  {played:19.1e}")


if __name__ == "__main__":
    main()
