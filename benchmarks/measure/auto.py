"""`method="auto"` beside PyTorch DDP at its best of five caps, on the same network.

    python -m benchmarks.measure.auto                       # all cells that have no result yet
    python -m benchmarks.measure.auto --cell exact-100 --rounds 4
    python -m benchmarks.measure.auto --table

Cells `exact-1000` ... `exact-100`, and `lossy-100`: 8 emulated hosts, the model of `measure.ddp_over_emulated_links` (16 square
layers, 8 MB of gradients, 0.1 s forward and 0.2 s backward, paced). Auto trains alone until it has decided; what
it chose and DDP's sides then take turns in blocks of steps, as in `measure.ddp_over_emulated_links`, whose sides these are.

Cell `loopback`: two processes on this machine, real arithmetic. Auto's first thousand steps, all
that it tries included, take turns with DDP's in blocks.

Each cell is kept in benchmarks/results/auto.json as soon as it is there.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.measure import ddp_over_emulated_links, harness
from benchmarks.measure.harness import ddp, ours
from paceline.cluster import uniform_cluster

RESULTS = Path(__file__).parents[1] / "results" / "auto.json"
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


def auto(consistency, folder):
    return ours(method=f"auto:consistency={consistency},file={folder}/decision")


def settle(side):
    """Steps until it has decided."""
    controller = controller_of(side.optimizer)
    for step in range(MOST_STEPS):
        side.step()
        if step > 5 and controller.steady:
            return step + 1
    return MOST_STEPS


def train(consistency, rounds, folder):
    """One emulated cell, on one worker."""
    mine = ddp_over_emulated_links.Side("auto", wrap=auto(consistency, folder))
    settling = settle(mine)
    sides = [mine]
    for cap in ddp_over_emulated_links.CAPS:
        sides.append(
            ddp_over_emulated_links.Side(f"DDP, caps of {cap} MiB", wrap=ddp(cap))
        )
    for side in sides:
        side.block(2)
    times = harness.take_turns(sides, rounds, ddp_over_emulated_links.BLOCK)
    said = [note for note in notes() if note.startswith("auto: ")]
    found = {
        "chosen": controller_of(mine.optimizer).present,
        "decided_after_steps": settling,
        "seconds": {name: statistics.median(one) for name, one in times.items()},
        "times": times,
        "said": said[-1] if said else "",
    }
    mine.optimizer.finish()
    return found


def notes():
    return list(paceline.api._runtime().recorder.notes)


def emulated(cell, rounds):
    consistency, mbit = EMULATED[cell]
    cluster = uniform_cluster(WORKERS, f"{mbit} Mbit/s", "50 us")
    with tempfile.TemporaryDirectory() as folder:
        found = harness.on_emulated_hosts(cluster, train, consistency, rounds, folder)
    seconds = found["seconds"]
    best = min((name for name in seconds if name != "auto"), key=seconds.__getitem__)
    pairs = zip(found["times"]["auto"], found["times"][best], strict=True)
    found["ddp_at_its_best"] = best
    found["to_ddp"] = statistics.median(mine / theirs for mine, theirs in pairs)
    return found


# ---- loopback ----


def make_layers():
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    draws = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(BATCH, WIDTH, generator=draws)
    return torch.nn.Sequential(*layers), lambda model: model(batch).square().mean()


class MeanSide(harness.Side):
    """A side whose seconds are the mean of all ranks."""

    def block(self, steps):
        took = torch.tensor([super().block(steps)], dtype=torch.float64)
        dist.all_reduce(took)
        return took.item() / dist.get_world_size()


def default_ddp(model, optimizer):
    return DistributedDataParallel(model), optimizer


def train_on_loopback(folder):
    sides = [
        MeanSide("auto", make_layers, auto("exact", folder)),
        MeanSide("DDP", make_layers, default_ddp),
    ]
    mine, theirs = sides
    theirs.block(BLOCK)  # connections and buffers of DDP; auto's count
    times = harness.take_turns(sides, HORIZON // BLOCK, BLOCK)
    means = {name: statistics.fmean(one) for name, one in times.items()}
    pairs = zip(*times.values(), strict=True)
    found = {
        "chosen": controller_of(mine.optimizer).present,
        "seconds": means,
        "to_ddp": means["auto"] / means["DDP"],
        "median_of_turns": statistics.median(a / b for a, b in pairs),
        "said": notes()[-1:],
    }
    harness.finish(sides)
    return found


def loopback():
    with tempfile.TemporaryDirectory() as folder:
        return harness.on_processes(2, train_on_loopback, folder)


def evidence():
    """Stored cells, those of the fastest links first."""
    results = json.loads(RESULTS.read_text())
    for cell in CELLS:
        found = results[cell]
        seconds = found["seconds"]
        consistency, mbit = EMULATED.get(cell, ("exact", None))
        best = found.get("ddp_at_its_best", "DDP")
        cap = best.partition("caps of ")[2]
        yield {
            "link": f"{mbit} Mbit/s" if mbit else "loopback, 2 processes",
            "allowed": consistency,
            "choice": f"`{found['chosen']}`",
            "after steps": str(found.get("decided_after_steps", "")),
            "s per step": f"{seconds['auto']:#.3g}",
            "best DDP": f"{seconds[best]:#.3g} ({f'cap {cap}' if cap else 'default'})",
            "auto / DDP": f"{found['to_ddp']:.3f}",
        }


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
    arguments = parser.parse_args()
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
    main()
