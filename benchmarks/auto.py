"""`method="auto"` beside PyTorch DDP at its best of five caps, on the same network.

    python benchmarks/auto.py                       # all cells that have no result yet
    python benchmarks/auto.py --cell exact-100 --rounds 4
    python benchmarks/auto.py --table

Cells `exact-1000` ... `exact-100`, and `lossy-100`: 8 emulated hosts, the model of `peers.py` (16 square
layers, 8 MB of gradients, 0.1 s forward and 0.2 s backward, paced). Auto trains alone until it has decided; what
it chose and DDP's sides then take turns in blocks of steps, as in `peers.py`, whose sides these are.

Cell `loopback`: two processes on this machine, real arithmetic. Auto's first thousand steps, all
that it tries included, take turns with DDP's in blocks.

Each cell is kept in benchmarks/results/auto.json as soon as it is there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peers
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.cluster import uniform_cluster
from paceline.run_options import ScriptJob

RESULTS = Path(__file__).parent / "results" / "auto.json"
EMULATED = {
    **{f"exact-{mbit}": ("exact", mbit) for mbit in (1000, 400, 200, 100)},
    "lossy-100": ("lossy", 100),
}
CELLS = (*EMULATED, "loopback")
WORKERS = 8
MOST_STEPS = 500
"""Until it has decided."""
HORIZON, BLOCK = 1000, 20
"""Of loopback: steps in all, and in a turn."""
WIDTH, DEPTH, BATCH = 512, 8, 256


def controller_of(optimizer):
    """Only it knows whether it has decided."""
    return optimizer._active.switcher.controller


def auto(consistency, file):
    """A side of `peers.py`."""
    spec = f"auto:consistency={consistency},file={file}"

    def wrap(model, optimizer):
        return model, paceline.distribute(model, optimizer, method=spec)

    return wrap


def settle(side):
    """Steps until it has decided."""
    controller = controller_of(side.optimizer)
    for step in range(MOST_STEPS):
        side.step()
        if step > 5 and controller.steady:
            return step + 1
    return MOST_STEPS


def work(arguments):
    """One emulated cell, on one worker."""
    paceline.init()
    consistency, _ = EMULATED[arguments.cell]
    folder = Path(arguments.output).parent
    mine = peers.Side("auto", auto(consistency, folder / "decision"))
    settling = settle(mine)
    peers_sides = [
        peers.Side(f"DDP, caps of {cap} MiB", peers.ddp(cap)) for cap in peers.CAPS
    ]
    sides = [mine, *peers_sides]
    for side in sides:
        side.block(2)
    times = {side.name: [] for side in sides}
    for turn in range(arguments.rounds):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            times[side.name].append(side.block())
    if dist.get_rank() == 0:
        recorder = paceline.api._runtime().recorder
        said = [note for note in recorder.notes if note.startswith("auto: ")]
        result = {
            "chosen": controller_of(mine.optimizer).present,
            "decided_after_steps": settling,
            "seconds": {name: statistics.median(one) for name, one in times.items()},
            "times": times,
            "said": said[-1] if said else "",
        }
        Path(arguments.output).write_text(json.dumps(result))
    mine.optimizer.finish()


def emulated(cell, rounds):
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    _, mbit = EMULATED[cell]
    cluster = uniform_cluster(WORKERS, f"{mbit} Mbit/s", "50 us")
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(cluster) as network:
        output = Path(scratch) / "result.json"
        words = ["--work", "--cell", cell, "--output", str(output)]
        words += ["--rounds", str(rounds)]
        if EmulatedJob(ScriptJob(__file__, words), network).run():
            sys.exit("the job failed")
        found = json.loads(output.read_text())
    seconds = found["seconds"]
    best = min((name for name in seconds if name != "auto"), key=seconds.__getitem__)
    pairs = zip(found["times"]["auto"], found["times"][best], strict=True)
    found["ddp_at_its_best"] = best
    found["to_ddp"] = statistics.median(mine / theirs for mine, theirs in pairs)
    return found


# ---- loopback ----


def make_layers():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    return torch.nn.Sequential(*layers)


def work_on_loopback(arguments):
    dist.init_process_group("gloo")
    paceline.init()
    batch = torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def side(wrap):
        model = make_layers()
        model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))

        def steps(count):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            dist.barrier()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(took)
            return took.item() / dist.get_world_size()

        return steps, optimizer

    file = Path(arguments.output).parent / "decision"
    mine, optimizer = side(auto("exact", file))
    theirs, _ = side(lambda model, opt: (DistributedDataParallel(model), opt))
    theirs(BLOCK)  # connections and buffers of DDP; auto's count
    total, ratios = [0.0, 0.0], []
    for turn in range(HORIZON // BLOCK):
        pair = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            pair[which] = (mine, theirs)[which](BLOCK)
        total = [sum(both) for both in zip(total, pair, strict=True)]
        ratios.append(pair[0] / pair[1])
    if dist.get_rank() == 0:
        result = {
            "chosen": controller_of(optimizer).present,
            "seconds": {"auto": total[0] / HORIZON, "DDP": total[1] / HORIZON},
            "to_ddp": total[0] / total[1],
            "median_of_turns": statistics.median(ratios),
            "said": list(paceline.api._runtime().recorder.notes)[-1:],
        }
        Path(arguments.output).write_text(json.dumps(result))
    optimizer.finish()


def loopback():
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", __file__, "--work", "--cell", "loopback"]
        command += ["--output", str(output)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if subprocess.run(command, env=environment, check=False).returncode:
            sys.exit("the job failed")
        return json.loads(output.read_text())


def table(results):
    print(
        "| cell | auto chose | after steps | s a step | DDP at its best | auto / DDP |"
    )
    print("|---|---|---|---|---|---|")
    for cell, found in results.items():
        seconds = found["seconds"]
        theirs = found.get("ddp_at_its_best", "DDP")
        print(
            f"| {cell} | `{found['chosen']}` | {found.get('decided_after_steps', '-')} | "
            f"{seconds['auto']:.4f} | {seconds[theirs]:.4f} ({theirs}) | {found['to_ddp']:.3f} |"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", action="append", choices=CELLS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        (arguments.cell,) = arguments.cell
        chosen = work_on_loopback if arguments.cell == "loopback" else work
        chosen(arguments)
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = arguments.cell or [cell for cell in CELLS if cell not in results]
    for cell in [] if arguments.table else wanted:
        begun = time.perf_counter()
        found = loopback() if cell == "loopback" else emulated(cell, arguments.rounds)
        found["took_seconds"] = time.perf_counter() - begun
        results[cell] = found
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{cell}: {found['to_ddp']:.3f} of DDP; {found['said']}", flush=True)
    table(results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
