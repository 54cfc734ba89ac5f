"""Baselines of the papers: R2SP, and bounded staleness.

*r2sp*: what turns gain over barriers, and over none, where workers share a server's link. Eight
equal workers with links like the server's, 8 layers of 100 kB, in virtual time. Computing takes
T_compute a step; T_sync is what textbook bsp over the server (one bucket, sent after backward)
spends beyond it: everybody's gradient to the server, then all parameters back. The figure is
steps a second of all workers together, over those of textbook bsp, while all of them are at work
and r2sp's warm-up is over. Columns without *textbook* take each method at its best: a bucket for
each layer, sent while backward runs. With jitter of 0 nothing but the network pushes workers of
asp out of step; with 5 % they spread by themselves. That bsp with 8 buckets gains as much as
textbook r2sp with 8 workers is no law: one leaves an eighth of T_sync exposed, the last bucket's,
and the other one its own.

*staleness*: what bounded staleness gains where compute times differ, and no communication
counts. 16 workers in four speed classes, 1 : 1.5 : 2 : 3, in virtual time, over
a network that never is the limit; 400 steps each; the parameter server takes no time. The figure
is steps a second, from the first step's start to the slowest worker's end, over those of bsp.
With persistent differences ssp ends at the slowest worker's pace, whatever its bound: it gains
what jitter costs a barrier. asp is given 400 steps of its slowest worker, and counts the steps
of all.
"""

from functools import partial

import torch

import paceline
from benchmarks.papers.results import Claim, Paper, Quick
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.runtimes.simulated import ComputeModel, Simulation

# ---- R2SP ----

WORKERS = 8
LAYERS, LAYER_BYTES = 8, 100_000
RATE = 12.5e6
STEPS = 100
MEASURED = 40
TEXTBOOK = "overlap=false,buckets=single"
BEST = "buckets=wfbp"
METHODS = {
    "bsp, textbook": f"bsp:collective=parameter-server,{TEXTBOOK}",
    "bsp": f"bsp:collective=parameter-server,{BEST}",
    "asp, textbook": f"asp:{TEXTBOOK}",
    "asp": f"asp:{BEST}",
    "ssp, textbook": f"ssp:{TEXTBOOK}",
    "ssp": f"ssp:{BEST}",
    "r2sp, textbook": f"r2sp:{TEXTBOOK}",
    "r2sp": f"r2sp:{BEST}",
}
BASE = next(iter(METHODS))
RATIOS = (0.25, 0.5, 1.0, 2.0)
JITTERS = (0.0, 0.05)


def throughput(method, compute, jitter, steps=STEPS, measured=MEASURED):
    """Steps a second of all workers, from when each has *measured* steps to go until the
    first has none."""
    rack = Rack(workers=WORKERS, link=RATE, latency=0.0)
    cluster = Cluster((rack,), servers=(ServerHost(),))
    ends = [[] for _ in range(WORKERS)]

    def train(rank):
        model = torch.nn.Module()
        model.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(LAYER_BYTES // 4)) for _ in range(LAYERS)
        )
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, sgd, method=method)
        for _ in range(steps):
            optimizer.zero_grad()
            sum(layer.sum() for layer in model.layers).backward()
            optimizer.step()
            ends[rank].append(paceline.now())
        optimizer.finish()

    # A model that is never called has no forward pass to charge for.
    model = ComputeModel(forward=0.0, backward=compute, jitter=jitter)
    Simulation(cluster, compute=model).run(train)
    start = max(mine[-1 - measured] for mine in ends)
    stop = min(mine[-1] for mine in ends)
    done = sum(start < end <= stop for mine in ends for end in mine)
    return done / (stop - start)


def sync_seconds():
    """T_sync: a step of textbook bsp with nothing to compute."""
    return WORKERS / throughput(METHODS[BASE], 0.0, 0.0, steps=12, measured=10)


def speed(results, name, ratio, jitter):
    """Steps a second of a method where T_sync is *ratio* times T_compute."""
    sync = results.value("r2sp, T_sync", "s", sync_seconds)
    measure = partial(throughput, METHODS[name], sync / ratio, jitter)
    row = f"r2sp, {name}, T_sync / T_compute = {ratio:g}, jitter {jitter:g}"
    return results.value(row, "steps/s", measure)


def over_textbook(name, ratio, jitter=0.0):
    def ours(results):
        mine, base = (speed(results, one, ratio, jitter) for one in (name, BASE))
        return mine / base

    return ours


def r2sp(results):
    """Steps a second over textbook bsp's, by T_sync over T_compute and jitter."""
    for jitter in JITTERS:
        for ratio in RATIOS:
            yield {"jitter": f"{jitter:.0%}", "T_sync/T_compute": f"{ratio:g}"} | {
                name: over_textbook(name, ratio, jitter)(results)
                for name in METHODS
                if name != BASE
            }


# ---- bounded staleness ----

LONG, STEP_SECONDS = 400, 0.1
BOUNDS = ("bsp:collective=parameter-server", "ssp", "ssp:staleness=10", "asp")
CLASSES = {"1 : 1.5 : 2 : 3": (1.0, 1.5, 2.0, 3.0)}


def throughput_of_classes(method, slownesses, jitter, workers=16):
    """Steps a second of all workers together, until the slowest has done its steps."""
    speeds = tuple(1 / slownesses[w * 4 // workers] for w in range(workers))
    rack = Rack(workers=workers, link=1e15, latency=0.0, speed=speeds)
    slowest = max(slownesses)
    ends = {}

    def train(rank):
        model = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, sgd, method=method, buckets="single")
        start = paceline.now()
        # Under asp a worker does as many more steps as it is faster.
        own = LONG
        if method == "asp":
            own = round(LONG * slowest * speeds[rank])
        x = torch.ones(1, 2)
        for _ in range(own):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        ends[rank] = own, paceline.now() - start
        optimizer.finish()

    compute = ComputeModel(
        forward=STEP_SECONDS / 3, backward=2 * STEP_SECONDS / 3, jitter=jitter
    )
    Simulation(Cluster((rack,)), compute=compute).run(train)
    return sum(own / seconds for own, seconds in ends.values())


def staleness(results):
    """Steps a second of ssp and asp over bsp's, by classes of speed and jitter."""
    for name, slownesses in CLASSES.items():
        for jitter in (0.0, 0.05, 0.2):
            found = {
                method: results.value(
                    f"staleness, {method}, {name}, jitter {jitter:g}",
                    "steps/s",
                    partial(throughput_of_classes, method, slownesses, jitter),
                )
                for method in BOUNDS
            }
            base = found[BOUNDS[0]]
            yield {"classes": name, "jitter": f"{jitter:.0%}"} | {
                method: found[method] / base for method in BOUNDS[1:]
            }


# ---- what is claimed ----

PAPER = Paper(
    name="baselines",
    title="R2SP: workers take turns (INFOCOM 2019)",
    page="explanation/parameter-server.md",
    source="the paper's abstract and the authors' code",
    claims=tuple(
        Claim(
            row=f"steps a second over bsp, T_sync / T_compute = {ratio:g}",
            says="up to 25 % faster training than with barriers",
            conditions="8 equal workers, one server; both methods send one bucket after backward (textbook form)",
            ours=over_textbook("r2sp, textbook", ratio),
            at_least=1.25,
            why_not="turns hide at most T_sync, which is 0.25 of T_compute here",
        )
        for ratio in (0.25, 0.5, 1.0)
    ),
    quick=(
        Quick(
            "r2sp over textbook bsp, T_sync / T_compute = 0.5",
            over_textbook("r2sp, textbook", 0.5),
            1.35,
        ),
    ),
    tables={"r2sp": r2sp, "staleness": staleness},
)
