"""What a seed stands for: a job and its faults, the same on every machine.

The simulator trains each drawn job first. It tells whether the method accepts the drawn keys, whether it applies each
gradient exactly once, and the final model where that does not depend on time.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch

import paceline
from paceline.cluster import parse_cluster, uniform_cluster
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import UpdatesOnServer
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


ROWS = dict.fromkeys([*METHODS, "auto"], MethodRow()) | {
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
    "streaming-diloco": MethodRow("sync_every=8,delay=1,fragments=2"),
    "sync-switch": MethodRow("bsp_steps=10", mean_steps=10),
}

# Values that a list has several times are drawn as often.
COMPRESSIONS = (
    *("", "", "", "int8", "bf16", "ef-sign"),
    # Without `small` they send the blocks of `Counting` uncompressed.
    *(f"{name},compression.small=0" for name in ("top-k", "gd-top-k", "powersgd")),
)
COLLECTIVES = ("", "", "", "ring", "halving-doubling", "hierarchical", "native")
IN_NETWORK = ("rina", "switchml", "atp")
"""Collectives of emulated jobs, too: each rack has an aggregator."""
SERVERS = ("", "", "", "2", "per-node")
EMULATED, SERVED, RAY = "paceline emulate", "paceline serve", "ray"
LAUNCHERS = ("paceline run", "paceline run", "torchrun", EMULATED)
SIGNALS = ("KILL", "KILL", "KILL", "TERM", "INT", "STOP")
HARMLESS = {"STOP", "CUT"}
"""Faults that pass: the job completes."""
OPTIONS = {"compression", "collective", "servers"}
"""Keys of a spec that are not the method's own."""


@dataclass(frozen=True)
class Fault:
    """One fault of a job."""

    kind: str
    """A signal to a process, without ``SIG``: one that gets ``STOP`` gets ``CONT`` after `pause`. ``FILES``: the process
    can open no further file for so long. ``CUT``: a link drops all messages for so long. ``FULL``: the disk of
    checkpoints and snapshots is full for so long. ``CLOSE``: nobody reads the job's output any more."""
    target: str
    """``worker N``, ``launcher``, or ``service N``: of servers, group servers, aggregators, the keeper of an emulated
    network and Ray's server, one. A cut has a link of the cluster file; ``disk`` and ``stdout`` are the job's."""
    anchor: str
    """``start`` of the job, or ``step N``: when the first worker has done step N."""
    delay: float
    """Seconds from the anchor to the fault."""
    pause: float = 0.0
    """Seconds that a passing fault lasts."""

    def __str__(self) -> str:
        pause = f" for {self.pause:.1f} s" if self.pause else ""
        return f"{self.kind}{pause} to {self.target} {self.delay:.2f} s after {self.anchor}"


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
    racks: int = 0
    """Of an emulated network, each with an aggregator."""
    serves: int = 0
    """Processes of ``paceline serve``."""
    defect: str = ""
    """Of a control: what its script does wrong (`broken_job`)."""

    def __str__(self) -> str:
        survive = " --survive" if self.survive and self.launcher != RAY else ""
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
    def cluster(self) -> str:
        """The cluster file of an emulated network: its racks, and the cuts of its links."""
        rack = CLUSTER_RACK.format(workers=self.workers // max(1, self.racks))
        cuts = [
            CUT.format(link=cut.target, at=cut.delay, end=cut.delay + cut.pause)
            for cut in self.faults
            if cut.kind == "CUT"
        ]
        return "\n".join([rack] * self.racks + cuts)

    @property
    def restarts(self) -> bool:
        """Whether the job can go on after a bad end: from a checkpoint or a snapshot."""
        return self.survive or self.save_every > 0


CLUSTER_RACK = """[[rack]]
workers = {workers}
link = "1 Gbit/s"
latency = "0 us"
uplink = "1 Gbit/s"
aggregates = true
"""
CUT = """[[rule]]
at = "{at:.3f} s"
cut = "{link}"

[[rule]]
at = "{end:.3f} s"
repair = "{link}"
"""


def applies_each_gradient_once(case: Case) -> bool | None:
    """Whether the method does. None: paceline refuses this training."""
    if case.method == "auto":
        return True if case.spec == "auto" else None
    if (results := simulated(case, SIMULATED_STEPS)) is None:
        return None
    expected = torch.zeros_like(results[0])
    expected[:, : case.workers] = -float(SIMULATED_STEPS)
    return all(torch.equal(result, expected) for result in results)


def final_model(case: Case) -> torch.Tensor | None:
    """The model of each job of this case that completes; None where it depends on time or on random numbers."""
    if case.method == "auto":
        return None
    by_time = METHODS[case.method].consistency in ("asynchronous", "delayed")
    # One machine is one rack for `paceline run`, and many hosts for the simulator.
    by_place = "collective=hierarchical" in case.spec
    if (by_time or by_place) and not applies_each_gradient_once(case):
        return None
    fast, slow = simulated(case, STEPS), simulated(case, STEPS, slow=True)
    if fast is None or slow is None:
        return None
    same = all(torch.equal(fast[0], other) for other in [*fast, *slow])
    return fast[0] if same else None


def simulated(
    case: Case, steps: int, *, slow: bool = False
) -> list[torch.Tensor] | None:
    """Each worker's model after the job without faults; None: paceline refuses this training."""
    return _simulated(case.spec, case.workers, case.racks, steps, slow)


@functools.cache
def _simulated(
    spec: str, workers: int, racks: int, steps: int, slow: bool
) -> list[torch.Tensor] | None:
    results: list[torch.Tensor] = []

    def train(rank: int) -> None:
        model = Counting(workers)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, plain, buckets="wfbp", method=spec)
        for _ in range(steps):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        optimizer.finish()
        results.append(counted(model))

    if racks:
        cluster = parse_cluster(Case(0, spec, workers, racks=racks).cluster)
    else:
        cluster = uniform_cluster(workers, *(SLOW_LINKS if slow else FAST_LINKS))
    simulation = Simulation(cluster, options=RunOptions(seed=int(slow)))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            simulation.run(train)
        except PacelineError:
            return None
    return results


FAST_LINKS = "1gbit", "50us"
SLOW_LINKS = "1mbit", "20ms"


def survives(spec: str) -> bool:
    """Whether `--survive` accepts this method."""
    if parse(spec).name == "auto":
        return False
    try:
        check_survives(make(parse(spec), OPTIONS)[0])
    except UsageError:
        return False
    return True


def servers_of_groups(spec: str, workers: int) -> int:
    """How many servers a method that `survives` has for its groups of workers; 0: it has no groups."""
    method = cast(UpdatesOnServer, make(parse(spec), OPTIONS)[0])
    groups = method.groups(workers)
    return groups.servers if groups else 0


def draw(seed: int, *, on_ray: bool = False) -> Case:
    """The case of a seed. *on_ray*: of its job on Ray, which has a method with one server."""
    choose = random.Random(seed)
    # On Ray and under --survive --server a job has one server.
    with_server = [name for name in sorted(ROWS) if survives(name)]
    one_server = [name for name in with_server if not servers_of_groups(name, 2)]
    name = choose.choice(one_server if on_ray else sorted(ROWS))
    while True:
        workers = choose.randint(2, 4)
        survive = on_ray or (name in with_server and choose.random() < 0.6)
        launcher = "paceline run" if survive else choose.choice(LAUNCHERS)
        serves = 0
        if on_ray:
            launcher = RAY
        elif name in with_server and choose.random() < 0.3:
            groups = servers_of_groups(name, workers)
            survive = survive and not groups
            serves = groups or (1 if survive else choose.choice((1, 2)))
            launcher = SERVED
        emulated = launcher == EMULATED
        racks = choose.choice((1, 2)) if emulated and workers == 4 else 1
        drawn = {
            "compression": choose.choice(COMPRESSIONS),
            "collective": choose.choice(COLLECTIVES + IN_NETWORK * 2 * emulated),
            # Under --survive the launcher decides on servers.
            "servers": "" if survive or serves else choose.choice(SERVERS),
        }
        options = [f"{key}={value}" for key, value in drawn.items() if value]
        keys = ",".join(filter(None, [ROWS[name].keys, *options]))
        case = Case(
            seed,
            f"{name}:{keys}" if keys else name,
            workers,
            survive,
            launcher,
            save_every=0 if survive else choose.choice((0, 0, 3, 7)),
            racks=racks * emulated,
            serves=serves,
        )
        if (survive or serves) and not survives(case.spec):
            continue
        if applies_each_gradient_once(case) is not None:
            break
    count = choose.choices((0, 1, 2, 3), weights=(1, 10, 4, 2))[0]
    return replace(case, faults=tuple(_fault(choose, case) for _ in range(count)))


def _fault(choose: random.Random, case: Case) -> Fault:
    kinds = [*SIGNALS, *SIGNALS, "FILES", "CLOSE"]
    kinds += ["FULL"] * 2 * case.restarts + ["CUT"] * 6 * (case.racks > 0)
    kind = choose.choice(kinds)
    worker = choose.randrange(case.workers)
    pause = min(20.0, 0.1 * 10 ** choose.uniform(0, 2.3))
    if kind == "CUT":
        direction = choose.choice(["", " out", " in"])
        at = choose.expovariate(4.0)
        # A connection tries again after up to twice the time of the cut.
        return Fault(kind, f"host {worker}{direction}", "step 0", at, pause / 2)
    if choose.random() < 0.3:
        anchor, delay = "start", choose.uniform(0.0, 6.0)
    else:
        step = choose.choice((0, STEPS - 2, STEPS - 1, *range(1, STEPS - 2)))
        anchor, delay = f"step {step}", choose.expovariate(20.0)
    processes = [f"worker {worker}"] * 4 + ["launcher", f"service {worker}"]
    target = {"FULL": "disk", "CLOSE": "stdout"}.get(kind, choose.choice(processes))
    passes = kind in ("STOP", "FILES", "FULL")
    return Fault(kind, target, anchor, delay, pause if passes else 0.0)
