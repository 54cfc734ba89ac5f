"""Processor time that gradient hooks add to a backward pass, beside PyTorch DDP's, 2 processes.

    python -m benchmarks.measure.gradient_hooks                       # 32, 200 and 1,000 small tensors, 64 large ones
    python -m benchmarks.measure.gradient_hooks --tensors 200 --rounds 80 --json
    python -m benchmarks.measure.gradient_hooks --rejected            # beside what docs/explanation/decisions.md rejects

What counts is the processor time of the thread that calls ``backward()``, above that of the same
model without hooks: so waiting for the network does not count, and what happens on gloo's threads
does not either. All sides live in one job and take turns in random order; each is timed for three steps in a
row, after one that does not count. DDP has ``gradient_as_bucket_view=True``, and paceline DDP's
bucket sizes (``buckets="ddp"``). A second model without hooks and a second DDP show the noise. *step* is the same of the
whole step: forward, backward and update. *calls*: Python functions of paceline that a backward pass enters, by gradient.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.measure import stored
from benchmarks.measure.harness import on_processes

SIZES = {
    "32": (32, 256),
    "200": (200, 256),
    "1000": (1000, 256),
    "64 large": (64, 1 << 18),
}
"""Tensors of a model, and elements of each, of 4 bytes."""
EXACT = ("bsp", "priority", "dear")
WARM_UP = 12
STEPS = 3
OURS = str(Path(paceline.__file__).parent)


class Dots(torch.nn.Module):
    """A model whose own backward pass costs little: one dot product for each parameter."""

    def __init__(self, tensors, elements):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(elements) * 0.01) for _ in range(tensors)
        )

    def forward(self, x):
        total = torch.zeros(())
        for weight in self.weights:
            total = total + weight.dot(x)
        return total


def alone(model, optimizer):
    return model, optimizer


def ddp(model, optimizer):
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def ours(method):
    def wrap(model, optimizer):
        return model, paceline.distribute(
            model, optimizer, method=method, buckets="ddp"
        )

    return wrap


def ddp_with_unused(model, optimizer):
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=True
    )
    return wrapped, optimizer


def ddp_with_hook(model, optimizer):
    """DDP's reducer and a communication hook in Python, as a method on top of it would need."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def average(_, bucket):
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, average)
    return wrapped, optimizer


def multi_grad_hooks(model, optimizer):
    """One hook of torch for each quarter of the tensors, which only counts."""
    weights = list(model.parameters())
    quarter = max(1, len(weights) // 4)
    for start in range(0, len(weights), quarter):
        register_multi_grad_hook(weights[start : start + quarter], lambda _: None)
    return model, optimizer


REJECTED = {
    "DDP, find_unused": ddp_with_unused,
    "DDP, Python comm hook": ddp_with_hook,
    "multi-grad hooks alone": multi_grad_hooks,
}
SIDES = {
    "without hooks": alone,
    "without hooks, again": alone,
    "DDP": ddp,
    "DDP, again": ddp,
    **{method: ours(method) for method in EXACT},
}


class Side:
    """One way to train; `step` returns the processor time of its backward pass and of all of it."""

    def __init__(self, tensors, elements, wrap):
        torch.manual_seed(0)
        model = Dots(tensors, elements)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        self.x = torch.ones(elements)
        self.model, self.optimizer = wrap(model, optimizer)

    def step(self):
        begin = time.thread_time()
        self.optimizer.zero_grad()
        loss = self.model(self.x)
        before = time.thread_time()
        loss.backward()
        after = time.thread_time()
        self.optimizer.step()
        return after - before, time.thread_time() - begin

    def calls(self):
        """Python functions of paceline that are entered in one backward pass."""
        found = 0

        def count(frame, event, _):
            nonlocal found
            found += event == "call" and frame.f_code.co_filename.startswith(OURS)

        self.optimizer.zero_grad()
        loss = self.model(self.x)
        sys.setprofile(count)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        self.optimizer.step()
        return found


def measure(title, rounds, wraps):
    """A row for each side."""
    tensors, elements = SIZES[title]
    sides = {name: Side(tensors, elements, wrap) for name, wrap in wraps.items()}
    times = {name: [] for name in sides}
    for side in sides.values():
        for _ in range(WARM_UP):
            side.step()
    order = random.Random(7)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name in order.sample(list(sides), len(sides)):
            dist.barrier()
            sides[name].step()
            times[name] += [sides[name].step() for _ in range(STEPS)]
        gc.collect()
    gc.enable()
    middle = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    plain, peer = middle["without hooks"], middle["DDP"]
    rows = []
    for name, side in sides.items():
        backward, step = (a - b for a, b in zip(middle[name], plain, strict=True))
        theirs = [a - b for a, b in zip(peer, plain, strict=True)]
        row = {
            "tensors": title,
            "side": name,
            "microseconds_a_tensor": 1e6 * backward / tensors,
            "of_ddp": backward / theirs[0],
            "step_of_ddp": step / theirs[1],
            "calls": None,
        }
        if isinstance(side.optimizer, paceline.DistributedOptimizer):
            row["calls"] = side.calls() / tensors
        rows.append(row)
    for side in sides.values():
        if isinstance(side.optimizer, paceline.DistributedOptimizer):
            side.optimizer.finish()
    return rows


def measure_alone(title, rounds, rejected):
    """`measure` in processes with one thread each."""
    torch.set_num_threads(1)
    return measure(title, rounds, SIDES | REJECTED if rejected else SIDES)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", choices=SIZES, action="append")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rejected", action="store_true")
    parser.add_argument("--json", action="store_true")
    stored.add_option(parser)
    args = parser.parse_args()
    with stored.Store(benchmark(args.rejected), args.store) as store:
        compare(args, store)


COLUMNS = {
    "microseconds_a_tensor": "us",
    "of_ddp": "",
    "step_of_ddp": "",
    "calls": "calls per gradient",
}
"""Figures of a side, with their units."""


def benchmark(rejected):
    return "gradient_hooks --rejected" if rejected else "gradient_hooks"


def table():
    """Rows of the table of docs."""
    figures = stored.Figures(benchmark(rejected=False))
    for title in ("1000", "200", "32", "64 large"):
        count, elements = SIZES[title]
        size = "1 MiB" if elements == 1 << 18 else "1 KiB"
        sides = [f"{title}, {side}, of_ddp" for side in EXACT]
        calls = figures.text(f"{title}, bsp, calls", ".1f")
        yield [f"{count:,} of {size}", *map(figures.text, sides), calls]


NOISE = "largest difference between DDP and a second copy of DDP"
WHOLE = "priority and dear, whole step"


def keep_extremes(store, rows):
    """Adds the noise of all sizes, and the range of what hooks take in a whole step."""
    again = [row["of_ddp"] for row in rows if row["side"] == "DDP, again"]
    store.add(NOISE, max(abs(ratio - 1) for ratio in again))
    past = [row["step_of_ddp"] for row in rows if row["side"] in ("priority", "dear")]
    store.add(f"{WHOLE}, least", min(past))
    store.add(f"{WHOLE}, largest", max(past))


def compare(args, store):
    """Measures and prints all sizes, and adds their figures to a `stored.Store`."""
    everything = []
    if not args.json:
        print(
            f"{'tensors':9} {'side':22} {'us/tensor':>9} {'of DDP':>7} {'step':>6} {'calls':>6}"
        )
    for title in args.tensors or SIZES:
        for row in on_processes(2, measure_alone, title, args.rounds, args.rejected):
            everything.append(row)
            for column, unit in COLUMNS.items():
                if row[column] is not None:
                    name = f"{title}, {row['side']}, {column}"
                    store.add(name, row[column], unit)
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            calls = "" if row["calls"] is None else f"{row['calls']:.1f}"
            print(
                f"{row['tensors']:9} {row['side']:22} {row['microseconds_a_tensor']:9.2f} "
                f"{row['of_ddp']:7.2f} {row['step_of_ddp']:6.2f} {calls:>6}",
                flush=True,
            )
    keep_extremes(store, everything)


if __name__ == "__main__":
    main()
