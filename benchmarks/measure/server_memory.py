"""What a parameter server holds, beside what it must: 4 workers, a model of 100 MB.

    python -m benchmarks.measure.server_memory

Peak resident memory of the server's process, less what it had when it was idle, against
the bound: parameters + optimizer state + one accumulator + one bucket per worker each way,
and n - 1 models more where sums go in rank order or a round waits for all its gradients.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from benchmarks.measure.harness import example, on_processes

MEGABYTES, LAYERS, STEPS = 100.0, 12, 5
CASES = {
    # spec: models held by parameters and momentum, models held by waiting gradients
    "bsp:collective=parameter-server,buckets=wfbp": (0, 1),
    "asp:buckets=wfbp": (2, 0),
    "backup:buckets=wfbp": (2, 1),
}


def memory(process, field):
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


def train(method):
    held, waiting = CASES[method]
    torch.manual_seed(0)
    model = example("layers").Layers(LAYERS, MEGABYTES, 0.0, 0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = paceline.distribute(model, sgd, method=method)
    workers, rank = dist.get_world_size(), dist.get_rank()
    before = server = 0
    if rank == 0:
        server = child_server()
        before = memory(server, "VmRSS")
        if held:
            before -= int(1e6 * MEGABYTES)  # its parameters were loaded by now
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((model(torch.zeros(())) - 1.0) ** 2).backward()
        optimizer.step()
    if rank == 0:
        peak = memory(server, "VmHWM") - before
        bucket = MEGABYTES / LAYERS
        bound = held * MEGABYTES + MEGABYTES * (held == 0) + 2 * workers * bucket
        bound += waiting * (workers - 1) * MEGABYTES
        print(f"| {method} | {peak / 1e6:.0f} MB | {bound:.0f} MB |", flush=True)
    optimizer.finish()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", nargs="+", choices=list(CASES), default=list(CASES))
    print("| method | above idle | bound |\n|---|---|---|", flush=True)
    for method in parser.parse_args().method:  # a job each: a process keeps its peak
        on_processes(4, train, method)


if __name__ == "__main__":
    main()
