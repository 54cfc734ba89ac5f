"""The parts of `aggregator.py` that need Linux, root and BPF: a rack of namespaces, and what a
datagram costs in the kernel."""

import copy
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.aggregator.rack import AGGREGATOR, Rack, inside
from tests.aggregator.twin import HOST, PORT, KernelSlots, frame

from paceline.aggregator.packets import Kind, blank
from paceline.aggregator.xdp.kernel import Kernel
from paceline.server.security import TRUSTED

__all__ = ["in_a_rack", "in_the_kernel", "inside"]

STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
TURNS = 3
"""Of both aggregators; the better one of each counts."""


def in_a_rack(options, measured):
    """Both aggregators in turn, by name."""
    os.environ[TRUSTED] = "1"  # a network of namespaces
    before = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        with Rack(options.workers) as rack:
            names = {"aggregator": rack.aggregator, "workers": rack.workers}
            turns = {"sockets": [], "xdp": []}
            for _ in range(TURNS):
                for path, found in turns.items():
                    mine = copy.copy(options)
                    mine.rack, mine.path, mine.host = names, path, AGGREGATOR
                    found.append(measured(mine))
    finally:
        STATISTICS.write_text(before)
    return {
        f"rack, {path}": max(found, key=lambda one: one["gbit_per_worker"])
        for path, found in turns.items()
    }


def in_the_kernel(workers=4, rounds=50):
    """Nanoseconds of the two programs, by values in a datagram; medians."""
    found = {}
    for elements in (62, 256, 358):
        kernel = Kernel(512, elements)
        kernel.serve((HOST, PORT))
        slots = KernelSlots(kernel, 1, 512, workers, elements)
        rows = blank(workers, elements)
        header, number = rows["header"], np.arange(workers)
        header["kind"], header["job"] = Kind.CONTRIBUTION, 1
        header["elements"], header["worker"] = elements, number
        header["bitmap"], rows["values"] = 1 << number, 1
        added, answered = [], []
        for turn in range(8 * rounds):
            header["slot"], header["round"] = turn % 8, turn // 8
            slots.seal.sign(rows)
            for worker in range(workers):
                sent = frame(rows[worker : worker + 1], worker)
                _, data, spent = kernel.objects.run("receive", sent)
                added.append(spent)
            answered.append(kernel.objects.run("answer", data)[2])
        header["round"] += 1
        slots.seal.sign(rows)
        again = frame(rows[:1])
        repeated = [kernel.objects.run("receive", again, 10_000)[2] for _ in range(5)]
        each = float(np.median(added))
        found[f"kernel, {elements} values"] = {
            "a contribution, ns": each,
            "of which checked and dropped as a repeat, ns": min(repeated),
            f"an answer to {workers}, ns": float(np.median(answered)),
            "gbit a second in, receiving alone": 32 * elements / each,
        }
        kernel.close()
    return found
