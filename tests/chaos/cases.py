"""What a seed stands for: a job and its faults, the same on every machine.

Whether a method accepts the drawn keys is found in the simulator, and so is whether it applies each gradient
exactly once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

import paceline
from paceline.cluster import uniform_cluster
from paceline.errors import PacelineError, UsageError
from paceline.methods import METHODS, check_survives, make
from paceline.run_options import RunOptions
from paceline.runtimes.simulated import Simulation
from paceline.spec import parse
from tests.chaos.counting import Counting, counted

STEPS = 40
"""Steps of each job."""
SIMULATED_STEPS = 16
"""More than any method of `ROWS` takes for its phases."""


class MethodRow(NamedTuple):
    """How a method trains for `STEPS` steps.

    keys: Keys whose defaults are for trainings of thousands of steps.
    mean_steps: The first so many steps apply the mean of the gradients that arrive. Each is then applied
        once, but its weight depends on the number of workers. Other gradients have the weight 1/n.
    """

    keys: str = ""
    mean_steps: int = 0


ROWS = dict.fromkeys(METHODS, MethodRow()) | {
    "backup": MethodRow(mean_steps=STEPS),
    "daso": MethodRow("group=2"),
    "diloco": MethodRow("sync_every=5"),
    "dssp": MethodRow("staleness=1,extra=2"),
    "gssp": MethodRow("measure_steps=5"),
    "hierarchical-local-sgd": MethodRow("sync_every=6,group=2"),
    "local-sgd": MethodRow("sync_every=4"),
    "osp": MethodRow(mean_steps=STEPS),
    "post-local-sgd": MethodRow("sync_every=4,sync_each_step_until=8"),
    "slowmo": MethodRow("sync_every=5"),
    "sparse-loco": MethodRow("sync_every=5"),
    "streaming-diloco": MethodRow("sync_every=8,delay=1"),
    "sync-switch": MethodRow("bsp_steps=10", mean_steps=10),
}

# Values that a list has several times are drawn as often.
COMPRESSIONS = (
    *("", "", "", "int8", "bf16", "ef-sign"),
    # Without `small` they send the blocks of `Counting` uncompressed.
    *(f"{name},compression.small=0" for name in ("top-k", "gd-top-k", "powersgd")),
)
COLLECTIVES = ("", "", "", "ring", "halving-doubling", "hierarchical", "native")
SERVERS = ("", "", "", "2", "per-node")
LAUNCHERS = ("paceline run", "paceline run", "torchrun")
SIGNALS = ("KILL", "KILL", "KILL", "TERM", "INT", "STOP")
OPTIONS = {"compression", "collective", "servers"}
"""Keys of a spec that are not the method's own."""


@dataclass(frozen=True)
class Fault:
    """A signal to one process of a job."""

    signal: str
    """Without ``SIG``. A process that gets ``STOP`` gets ``CONT`` after `pause`."""
    target: str
    """``worker N``, ``launcher`` or ``service``: a server, a group server or an aggregator."""
    anchor: str
    """``start`` of the job, or ``step N``: when the first worker has done step N."""
    delay: float
    """Seconds from the anchor to the signal."""
    pause: float = 0.0
    """Seconds for which a process is stopped."""

    def __str__(self) -> str:
        pause = f" for {self.pause:.1f} s" if self.signal == "STOP" else ""
        return f"{self.signal}{pause} to {self.target} {self.delay:.2f} s after {self.anchor}"


@dataclass(frozen=True)
class Case:
    """A job and its faults."""

    seed: int
    spec: str
    workers: int
    survive: bool = False
    launcher: str = "paceline run"
    save_every: int = 0
    """Steps from one checkpoint to the next; 0: it has none."""
    faults: tuple[Fault, ...] = ()
    defect: str = ""
    """Of a control: what its script does wrong (`broken_job`)."""

    def __str__(self) -> str:
        survive = " --survive" if self.survive else ""
        save = (
            f", a checkpoint every {self.save_every} steps" if self.save_every else ""
        )
        faults = "; ".join(map(str, self.faults)) or "no fault"
        return f"seed {self.seed}: {self.launcher}{survive}, {self.workers} workers, {self.spec}{save} | {faults}"

    @property
    def method(self) -> str:
        return parse(self.spec).name

    @property
    def mean_steps(self) -> int:
        return ROWS[self.method].mean_steps

    @property
    def restarts(self) -> bool:
        """Whether the job can go on after a bad end: from a checkpoint or a snapshot."""
        return self.survive or self.save_every > 0


@functools.cache
def applies_each_gradient_once(spec: str, workers: int) -> bool | None:
    """Simulate the job without faults. None: paceline refuses this training."""
    results: list[torch.Tensor] = []

    def train(rank: int) -> None:
        model = Counting(workers)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, plain, buckets="wfbp", method=spec)
        for _ in range(SIMULATED_STEPS):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        optimizer.finish()
        results.append(counted(model))

    cluster = uniform_cluster(workers, "1gbit", "50us")
    simulation = Simulation(cluster, options=RunOptions(seed=0))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            simulation.run(train)
        except PacelineError:
            return None
    expected = torch.zeros_like(results[0])
    expected[:, :workers] = -float(SIMULATED_STEPS)
    return all(torch.equal(result, expected) for result in results)


def survives(spec: str) -> bool:
    """Whether `--survive` accepts this method."""
    try:
        check_survives(make(parse(spec), OPTIONS)[0])
    except UsageError:
        return False
    return True


def draw(seed: int) -> Case:
    """The case of a seed."""
    choose = random.Random(seed)
    while True:
        workers = choose.randint(2, 4)
        name = choose.choice(sorted(METHODS))
        survive = survives(name) and choose.random() < 0.6
        drawn = {
            "compression": choose.choice(COMPRESSIONS),
            "collective": choose.choice(COLLECTIVES),
            # Under --survive the launcher decides on servers.
            "servers": "" if survive else choose.choice(SERVERS),
        }
        options = [f"{key}={value}" for key, value in drawn.items() if value]
        keys = ",".join(filter(None, [ROWS[name].keys, *options]))
        spec = f"{name}:{keys}" if keys else name
        if survive and not survives(spec):
            continue
        if applies_each_gradient_once(spec, workers) is not None:
            break
    faults = choose.choices((0, 1, 2, 3), weights=(1, 10, 4, 2))[0]
    return Case(
        seed,
        spec,
        workers,
        survive,
        launcher="paceline run" if survive else choose.choice(LAUNCHERS),
        save_every=0 if survive else choose.choice((0, 0, 3, 7)),
        faults=tuple(_fault(choose, workers) for _ in range(faults)),
    )


def _fault(choose: random.Random, workers: int) -> Fault:
    signal = choose.choice(SIGNALS)
    worker = f"worker {choose.randrange(workers)}"
    target = choose.choice([worker] * 4 + ["launcher", "service"])
    if choose.random() < 0.25:
        anchor, delay = "start", choose.uniform(0.0, 6.0)
    else:
        step = choose.choice((0, STEPS - 2, STEPS - 1, *range(1, STEPS - 2)))
        anchor, delay = f"step {step}", choose.expovariate(20.0)
    pause = 0.0
    if signal == "STOP":
        pause = min(20.0, 0.1 * 10 ** choose.uniform(0, 2.3))
    return Fault(signal, target, anchor, delay, pause)
