"""What OSP's two stages gain, in virtual time, where the network costs r times the computing.

    python benchmarks/osp.py                      # all tables
    python benchmarks/osp.py --only textbook      # against the model of the paper's form
    python benchmarks/osp.py --only server        # overlapped, over a parameter server
    python benchmarks/osp.py --only native        # by all-reduce
    python benchmarks/osp.py --only workloads     # ResNet-50, VGG-16, BERT-base

8 workers (and a server on a host of its own). Eight equal layers of 8 MiB, 0.1 s forward
and 0.2 s backward. r is what the textbook form (everything sent after backward, one method
of its own: server or ring) spends beyond computing, over computing; the link is chosen so.
Speed-ups are of seconds a step, over the last 40 of 140 steps. The plan has settled by then, and
the whole budget with budget=constant; osp as it comes has a quarter of it (no loss is told
here, and it grows over 500 steps), so it is measured again over steps 501 to 540.

The model of the textbook form, for a part u of the bytes deferred:
(1 + r) / (1 + (1 - u) r + max(0, u r - 1)).
"""

import argparse
import json
import sys

import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost, Workload
from paceline.runtimes.simulated import ComputeModel, Simulation

WORKERS = 8
LAYERS = 8
STEPS, LAST = 140, 40
GROWN = 540
LATENCY = 50e-6
RATIOS = (0.25, 0.5, 1, 2, 4)
PARTS = (0.25, 0.5, 0.8, 1)
EQUAL = Workload(
    names=tuple(f"layer{number}" for number in range(LAYERS)),
    sizes=(8 * 2**20,) * LAYERS,
    forward=(0.1 / LAYERS,) * LAYERS,
    backward=(0.2 / LAYERS,) * LAYERS,
)
COMPUTE = EQUAL.forward_seconds + EQUAL.backward_seconds
OSP = "budget=constant"
SERVER_METHODS = (
    "osp",
    f"osp:{OSP}",
    f"osp:{OSP},servers=per-node",
    "bsp:collective=parameter-server,servers=per-node",
    "asp",
    "ssp",
    "r2sp",
)
NATIVE_METHODS = ("osp:collective=native", f"osp:collective=native,{OSP}")


def seconds(method, workload, link, buckets, servers=1, steps=STEPS, last=LAST):
    """Of a step, all workers together: a worker's share of an asynchronous job counts as
    it comes."""
    spans = {}

    def train(rank):
        paceline.init()
        model = paceline.stand_in(workload)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, sgd, method=method, buckets=buckets)
        x = torch.ones(int(workload.batch or 1))
        ends = []
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            ends.append(paceline.now())
        spans[rank] = (ends[-1] - ends[-1 - last]) / last
        optimizer.finish()

    rack = Rack(workers=WORKERS, link=link, latency=LATENCY)
    hosts = (ServerHost(),) * servers
    compute = ComputeModel(workload=workload)
    Simulation(Cluster((rack,), servers=hosts), compute=compute).run(train)
    return WORKERS / sum(1 / span for span in spans.values())


def server_link(r):
    """Bytes a second at which textbook server-BSP spends r times the computing: pushes and
    pulls of eight layers follow each other like wagons, so the last pull alone is seen."""
    moved = WORKERS * sum(EQUAL.sizes) * (1 + 1 / LAYERS)
    return moved / (r * COMPUTE)


def one_message_link(r):
    """The same where all gradients are one message: push, then pull."""
    return 2 * WORKERS * sum(EQUAL.sizes) / (r * COMPUTE)


def ring_link(r):
    return ring_seconds(EQUAL, 1.0) / (r * COMPUTE)


def ring_seconds(workload, link):
    return 2 * (WORKERS - 1) / WORKERS * sum(workload.sizes) / link


def compute(workload):
    return workload.forward_seconds + workload.backward_seconds


def model(r, u):
    return (1 + r) / (1 + (1 - u) * r + max(0.0, u * r - 1))


def textbook():
    for r in RATIOS:
        link = one_message_link(r)
        textbook_bsp = "bsp:collective=parameter-server,overlap=false"
        base = seconds(textbook_bsp, EQUAL, link, "single", steps=12, last=6)
        row = {"r": (base - COMPUTE) / COMPUTE}
        for u in PARTS:
            spec = f"osp:overlap=false,defer=most,most={u},{OSP}"
            takes = seconds(spec, EQUAL, link, "single", steps=60, last=20)
            row[f"u={u}"] = base / takes
            # Pieces of 4 MiB: what can be had of u.
            row[f"model u={u}"] = model(row["r"], int(u * 16) / 16)
        yield row


def server():
    for r in RATIOS:
        link = server_link(r)
        base = seconds(
            "bsp:collective=parameter-server", EQUAL, link, "wfbp", steps=12, last=6
        )
        row = {"r": r, "bsp seconds": base}
        for method in SERVER_METHODS:
            servers = 0 if "per-node" in method else 1
            row[method] = base / seconds(method, EQUAL, link, "wfbp", servers)
        grown = seconds("osp", EQUAL, link, "wfbp", steps=GROWN)
        yield row | {f"osp, until step {GROWN}": base / grown}


def native():
    for r in RATIOS:
        link = ring_link(r)
        base = seconds("bsp", EQUAL, link, "optimal")
        row = {"r": r, "bsp seconds": base}
        for method in NATIVE_METHODS:
            row[method] = base / seconds(method, EQUAL, link, "optimal")
        grown = seconds(NATIVE_METHODS[0], EQUAL, link, "optimal", steps=GROWN)
        yield row | {f"{NATIVE_METHODS[0]}, until step {GROWN}": base / grown}


def workloads():
    for name in ("resnet50", "vgg16", "bert-base"):
        workload = Workload.load(name)
        for gbit in (1, 10, 25):
            link = gbit * 1e9 / 8
            few = {"steps": 100, "last": 20}
            ring = seconds("bsp", workload, link, "optimal", **few)
            ours = seconds(NATIVE_METHODS[1], workload, link, "optimal", **few)
            held = "bsp:collective=parameter-server"
            push = seconds(held, workload, link, "ddp", steps=12, last=6)
            osp = seconds(SERVER_METHODS[1], workload, link, "ddp", **few)
            yield {
                "workload": name,
                "Gbit/s": gbit,
                "r": ring_seconds(workload, link) / compute(workload),
                "bsp seconds": ring,
                NATIVE_METHODS[1]: ring / ours,
                "server-bsp seconds": push,
                SERVER_METHODS[1]: push / osp,
            }


TABLES = {
    "textbook": textbook,
    "server": server,
    "native": native,
    "workloads": workloads,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for name, rows in TABLES.items():
        if arguments.only not in (None, name):
            continue
        found[name] = []
        for row in rows():
            if not arguments.json:
                if not found[name]:
                    print(f"\n{name}\n\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
                cells = (
                    f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()
                )
                print(f"| {' | '.join(cells)} |", flush=True)
            found[name].append(row)
    if arguments.json:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
