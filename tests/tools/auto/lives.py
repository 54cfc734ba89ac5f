"""Run by each of two processes: ``python -m tests.tools.auto.lives MODE``."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import paceline
from paceline.methods import METHODS
from paceline.methods.bsp import BSP
from tests.tools.auto.cases import Scripted, begun, changing, flat, follows, one_step

SPECS = (
    *("dear", "bsp:collective=tree", "bsp:compression=int8", "osp:collective=native"),
    *(
        "local-sgd:sync_every=2",
        "bsp:buckets=wfbp",
        "ds-sync",
        "bsp:collective=parameter-server",
    ),
)


ROUNDS = 2


class EveryOther(Scripted):
    """Changes after every other step; *does* something instead at one of them."""

    def __init__(self, does=None, at=0):
        super().__init__({}, meets=does is None)
        self.does, self.at = does, at

    def run(self):
        step = 0
        while True:
            step += 1
            if step == self.at and self.does and paceline.rank() == 1:
                self.does()
            spec = SPECS[step // 2 % len(SPECS)] if step % 2 == 0 else None
            why = yield spec
            assert not why, f"{spec}: {why}"


def counted():
    """Threads as the kernel has them, and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_changes():
    net, wrapped = begun(follows(EveryOther()))
    counts = []
    for step in range(ROUNDS * 2 * len(SPECS) + 1):
        one_step(net, wrapped, step)
        if step % (2 * len(SPECS)) == 0:
            counts.append(counted())
    wrapped.finish()
    (threads, files), (threads_later, files_later) = counts[1], counts[-1]
    assert threads_later == threads, counts
    # A training with servers leaves one descriptor on the worker that has started them.
    assert files_later - files <= ROUNDS - 1, counts


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def raises():
    raise ArithmeticError("on purpose")


def train(controller):
    net, wrapped = begun(follows(controller))
    for step in range(30):
        one_step(net, wrapped, step)
    wrapped.finish()
    sys.stdout.write(f"ended {flat(net).sum()}\n")


def catches():
    """One worker's script catches what has broken its training, and ends well."""
    try:
        train(EveryOther(raises, 10))
    except ArithmeticError:
        sys.stdout.write("caught\n")


@dataclass(frozen=True, kw_only=True)
class Breaks(BSP):
    """One worker cannot begin it, by a mistake in its code."""

    name = "breaks"

    def start(self, run):
        if run.comm.rank:
            raise ArithmeticError("on purpose")
        return super().start(run)


def breaks():
    """One worker's script catches what has left it without a training, and goes on."""
    METHODS["breaks"] = Breaks
    net, wrapped = begun(changing({3: "breaks"}))
    try:
        for step in range(6):
            one_step(net, wrapped, step)
    except ArithmeticError:
        sys.stdout.write(f"caught; {wrapped.broken_by}\n")


MODES = {
    "breaks": breaks,
    "many": many_changes,
    "dies": lambda: train(EveryOther(dies, 10)),
    "raises": lambda: train(EveryOther(raises, 10)),
    "catches": catches,
}
began = time.monotonic()
MODES[sys.argv[1]]()
sys.stdout.write(f"took {time.monotonic() - began:.2f} s\n")
