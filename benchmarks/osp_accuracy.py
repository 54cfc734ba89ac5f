"""What OSP gains, and whether it loses accuracy: as many steps as bsp, seed by seed.

    python benchmarks/osp_accuracy.py                   # digits, bytes_lm: 25 minutes
    python benchmarks/osp_accuracy.py --only digits --seeds 10
    python benchmarks/osp_accuracy.py --only ablations  # digits: what to defer, and when
    python benchmarks/osp_accuracy.py --only rates      # digits at higher learning rates
    python benchmarks/osp_accuracy.py --quick           # 2 seeds, a quarter of the steps
    python benchmarks/osp_accuracy.py --only plot --plot docs/osp_accuracy.png

8 simulated workers (and a server on a host of its own) train in virtual time. Of each seed all
methods have the same initial model and the same batches.

*digits*: the CNN of examples/digits.py, batches of 64, 150 steps of SGD with momentum 0.9,
the learning rate falling linearly from 0.05 to 0. The figure is test accuracy in per cent,
a mean over the last 5 evaluations, 5 steps apart: one of the 360 test images is 0.28
points. The test loss of the same evaluations stands beside it.
*bytes_lm*: the byte model of examples/bytes_lm.py with one layer of width 32, batches of
32, 400 steps of AdamW, one cycle up to 0.01: long enough that osp as it comes defers a
quarter. Bits per byte of test text at the end, where the learning rate is all but 0: over the
last 20 steps it changes by less than 0.02 %; a mean over evaluations would say the same.

A method is inside if its mean paired difference to bsp is within 2 standard errors of 0,
and within 0.3 points, or 0.5 % of bsp's bits per byte. Two standard errors of 5 seeds
are passed by chance in one row of nine. The control has to be outside: everything
deferred and no correction, so that each step works with what is one step old.

A bucket per tensor, sent while backward runs, over links on which sending takes as long as
computing. "deferred" is the part of all gradient bytes that travelled in stage 2; "speed-up"
is of the very runs that accuracy is of: seconds of virtual time that bsp takes (under a server: bsp
over a server) over those that the row takes, from the first step to the first evaluation,
the time in which nothing is deferred yet included.
"""

import argparse
import copy
import json
import statistics
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

import accuracy_tasks
import torch
from accuracy import BASE, SEEDS, standard_error, verdict
from accuracy_tasks import digits
from osp_comparisons import KINDS

import paceline
from paceline import methods, spec
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.methods.osp import OSP
from paceline.runtimes.simulated import ComputeModel, Simulation

WORKERS = 8
FORWARD, BACKWARD = 0.1, 0.2
LATENCY = 50e-6
EVALUATIONS, APART = 5, 5
ALL = "defer=most,most=1,budget=constant"
MOST = "defer=most,most=0.8,budget=constant"
NATIVE = "osp:collective=native"
SERVER_BASE = "bsp:collective=parameter-server"
CONTROL = f"{NATIVE},{ALL},correction=none"
MAIN = {
    "as it comes, native": NATIVE,
    "budget=constant, native": f"{NATIVE},budget=constant",
    "as it comes, server": "osp",
    "budget=constant, server": "osp:budget=constant",
    "ramp=50, native": f"{NATIVE},ramp=50",
    "everything deferred, native": f"{NATIVE},{ALL}",
    "everything deferred, server": f"osp:{ALL}",
    "everything, average": f"{NATIVE},{ALL},compared=average",
    "everything, plain": f"{NATIVE},{ALL},compared=plain",
    "everything, correction=none (control)": CONTROL,
}
FEWER = {
    name: MAIN[name]
    for name in (
        "as it comes, native",
        "budget=constant, native",
        "as it comes, server",
        "budget=constant, server",
        "everything deferred, native",
        "everything, plain",
        "everything, correction=none (control)",
    )
}
"""On bytes_lm, where a row takes minutes."""
ABLATIONS = {
    "80 %": f"{NATIVE},{MOST}",
    "80 %, order=importance": f"{NATIVE},{MOST},order=importance",
    **{
        f"80 %, order=importance, {kind}": (
            f"{NATIVE},{MOST},order=importance,compared={kind}"
        )
        for kind in ("random", "inverse")
    },
    "up to everything, budget=linear, ramp=100": (
        f"{NATIVE},defer=most,most=1,budget=linear,ramp=100"
    ),
    "up to everything, budget=loss, ramp=100": (
        f"{NATIVE},defer=most,most=1,budget=loss,ramp=100"
    ),
}
RATES = (0.1, 0.2)
"""Learning rates: twice and four times that of digits."""


# ---- what is trained ----


DIGITS = replace(
    accuracy_tasks.DIGITS,
    steps=150,
    model=digits.make_model,
    optimizer=lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9),
    rate=0.05,
)
BYTES = replace(
    accuracy_tasks.BYTES,
    steps=400,
    batch=32,
    optimizer=lambda p, rate: torch.optim.AdamW(p, lr=rate),
)


# ---- one training ----


@dataclass
class Trained:
    """*figures*: rank 0's evaluations by step; *ends*: of its steps, in virtual seconds;
    *deferred*: the part of each step's gradient bytes that is sent in stage 2."""

    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    deferred: list[float] = field(default_factory=list)

    def figure(self, name):
        """The mean over all evaluations: as it diverged, if one is not a number."""
        return statistics.fmean(f[name] for f in self.figures.values())


def watched(cls):
    """OSP, or what it is compared with, which notes what it defers."""

    class Watched(cls):
        def start(self, run):
            worker = super().start(run)
            update = worker.after_update

            def after_update():
                update()
                layout = worker.layout
                if run.comm.rank == 0:
                    late = sum(layout.sizes[number] for number in layout.deferred)
                    NOTED.append(late / sum(layout.sizes))

            worker.after_update = after_update
            return worker

    return Watched


NOTED: list[float] = []


def method_of(text):
    """A method object, watched if it is osp; and what else the spec says. The key *compared*
    names what osp is compared with."""
    method, rest = methods.make(spec.parse(text), {"collective", "compared"})
    if isinstance(method, OSP):
        cls = watched(KINDS.get(rest.pop("compared", None), OSP))
        method = cls(**{f.name: getattr(method, f.name) for f in fields(method)})
    return method, rest


def by_ring(text):
    return text == BASE or "collective=native" in text


def link_of(task, text):
    """Bytes a second at which a step's traffic takes as long as its computing: to a server
    and back for all workers, or around a ring."""
    size = 4 * sum(p.numel() for p in task.model().parameters())
    moved = 2 * (WORKERS - 1) / WORKERS * size if by_ring(text) else 2 * WORKERS * size
    return moved / (FORWARD + BACKWARD)


def train(task, text, seed, evaluations, rate=None, jitter=0.0):
    """Train *task* with the method of a spec; evaluate after the steps *evaluations*."""
    trained = Trained()
    method, rest = method_of(text)
    rate = task.rate if rate is None else rate
    NOTED.clear()

    def body(rank):
        torch.manual_seed(seed)
        model = task.model()
        # Computing with another model takes no virtual time.
        to_evaluate = copy.deepcopy(model)
        optimizer = paceline.distribute(
            model,
            task.optimizer(model.parameters(), rate),
            method=method,
            buckets="wfbp",
            **rest,
        )
        schedule = task.schedule(optimizer, task.steps, rate)
        batches = task.batches(task.batch, seed, rank, WORKERS)
        for step in range(1, task.steps + 1):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = task.loss(model(x), y)
            loss.backward()
            optimizer.step(loss=loss)
            schedule.step()
            if rank:
                continue
            trained.ends.append(paceline.now())
            if step in evaluations:
                with optimizer.consolidated():
                    to_evaluate.load_state_dict(model.state_dict())
                trained.figures[step] = task.evaluate(to_evaluate)
        optimizer.finish()

    rack = Rack(workers=WORKERS, link=link_of(task, text), latency=LATENCY)
    compute = ComputeModel(forward=FORWARD, backward=BACKWARD, jitter=jitter)
    cluster = Cluster((rack,), servers=(ServerHost(),))
    Simulation(cluster, compute=compute).run(body)
    trained.deferred = list(NOTED)
    return trained


# ---- tables ----


def last_steps(task):
    if task.name == "bytes_lm":
        return {task.steps}
    return {task.steps - APART * n for n in range(EVALUATIONS)}


@cache
def baseline(task, seed, rate):
    return train(task, BASE, seed, last_steps(task), rate)


def compared(task, named, seeds, rate=None):
    """A row for bsp, and one per method of *named* with its paired difference."""
    steps = last_steps(task)
    base = [baseline(task, seed, rate) for seed in range(seeds)]
    until = min(steps) - 1
    yield row_of(task, BASE, BASE, base, base) | {"speed-up": 1.0}
    for name, text in named.items():
        mine = [train(task, text, seed, steps, rate) for seed in range(seeds)]
        beside = base if by_ring(text) else [server_baseline(task, rate)] * seeds
        gain = statistics.fmean(
            theirs.ends[until - 1] / ours.ends[until - 1]
            for theirs, ours in zip(beside, mine, strict=True)
        )
        yield row_of(task, name, text, mine, base) | {"speed-up": gain}


@cache
def server_baseline(task, rate):
    """Its times are those of every seed."""
    return train(task, SERVER_BASE, 0, (), rate)


def row_of(task, name, text, mine, base):
    figures = list(next(iter(base[0].figures.values())))
    row = {"task": task.name, "method": name, "spec": text, "seeds": len(mine)}
    row["deferred"] = statistics.fmean(
        statistics.fmean(one.deferred or [0.0]) for one in mine
    )
    for number, figure in enumerate(figures):
        ours = [one.figure(figure) for one in mine]
        theirs = [one.figure(figure) for one in base]
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        if task.relative:
            mean = statistics.fmean(theirs)
            differences = [100 * d / mean for d in differences]
        row[figure] = statistics.fmean(ours)
        row[f"{figure}, difference"] = statistics.fmean(differences)
        row[f"{figure}, standard error"] = error = standard_error(differences)
        row[f"{figure}, by seed"] = ours
        if number == 0 and text != BASE:
            row["verdict"] = verdict(task, statistics.fmean(differences), error)
    return row


def show(row, first):
    judged = "bits per byte" if row["task"] == "bytes_lm" else "accuracy"
    unit = "%" if row["task"] == "bytes_lm" else "points"
    extra = "test loss" in row
    if first:
        head = ["method", "deferred", "speed-up", judged, f"difference, {unit}"]
        head += ["test loss, difference"] if extra else []
        print(f"\n| {' | '.join([*head, 'verdict'])} |\n|{'---|' * (len(head) + 1)}")
    digits_of = 3 if judged == "bits per byte" else 2
    cells = [row["method"], f"{row['deferred']:.0%}", f"{row['speed-up']:.2f}"]
    cells.append(f"{row[judged]:.{digits_of}f}")
    bare = row["spec"] == BASE
    for figure in (judged, "test loss") if extra else (judged,):
        places = 3 if figure == "test loss" else 2
        off, error = row[f"{figure}, difference"], row[f"{figure}, standard error"]
        text = f"{row[figure]:.3f}" if bare and figure == "test loss" else ""
        cells.append(text if bare else f"{off:+.{places}f} ± {error:.{places}f}")
    print(f"| {' | '.join(cells)} | {row.get('verdict', '')} |", flush=True)


def rates(task, seeds):
    """At which learning rates OSP, and what is stale without it, hold out."""
    chosen = ("everything deferred, native", "everything, correction=none (control)")
    for rate in RATES:
        for row in compared(task, {name: MAIN[name] for name in chosen}, seeds, rate):
            row["method"] += f" at {rate:g}"
            yield row


# ---- the picture ----

PANELS = {
    "over a server": {
        "bsp": "bsp:collective=parameter-server",
        "asp": "asp",
        "ssp": "ssp",
        "r2sp": "r2sp",
        "osp": "osp",
        "osp, budget=constant": "osp:budget=constant",
    },
    "by all-reduce": {
        "bsp": "bsp",
        "osp": NATIVE,
        "osp, budget=constant": f"{NATIVE},budget=constant",
    },
}
STYLES = {
    "bsp": ("#24292f", "-", 1.6, "bsp"),
    "asp": ("#cc79a7", "-", 4.5, "asp"),  # wide: ssp lies on it
    "ssp": ("#8a4a74", "--", 1.3, "ssp"),
    "r2sp": ("#56b4e9", "-", 1.6, "r2sp"),
    "osp": ("#d55e00", (0, (3, 2)), 2.2, "osp, default: deferring grows"),
    "osp, budget=constant": ("#d55e00", "-", 2.2, "osp, budget=constant"),
}
JITTER = 0.05
LOSSES = (0.1, 0.2, 0.5, 1, 2)


def curves(task, seeds, every=10):
    """Times are of a run without evaluations, which make osp wait for its stage 2."""
    for panel, named in PANELS.items():
        for name, text in named.items():
            if text not in methods.METHODS and ":" not in text:
                continue
            times = train(task, text, 0, (), jitter=JITTER).ends
            steps = range(every, task.steps + 1, every)
            runs = [train(task, text, s, steps, jitter=JITTER) for s in range(seeds)]
            figures = {
                figure: [
                    statistics.fmean(run.figures[step][figure] for run in runs)
                    for step in steps
                ]
                for figure in next(iter(runs[0].figures.values()))
            }
            seconds = [times[step - 1] for step in steps]
            yield {"panel": panel, "method": name, "seconds": seconds, **figures}


def draw(found, task, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    both = figure.subplots(1, 2, sharey=True)
    for axes, panel in zip(both, PANELS, strict=True):
        for curve in found:
            if curve["panel"] != panel:
                continue
            colour, dash, width, label = STYLES[curve["method"]]
            axes.plot(
                curve["seconds"],
                curve["test loss"],
                label=label,
                color=colour,
                linestyle=dash,
                linewidth=width,
                marker="o",
                markevery=[-1],
                markersize=6,
            )
        text = next(iter(PANELS[panel].values()))
        link = link_of(task, text) * 8 / 1e6
        axes.set_title(f"{panel}, links of {link:.0f} Mbit/s", fontsize=11)
        axes.set_yscale("log")
        axes.set_yticks(LOSSES, [f"{loss:g}" for loss in LOSSES])
        axes.yaxis.minorticks_off()
        axes.set_xlim(left=0)
        axes.set_xlabel("virtual seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    both[0].set_ylabel("test loss")
    figure.suptitle(
        f"digits' CNN, 8 workers, {task.steps} steps of each method; "
        "sending takes as long as computing",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser()
    parts = ("digits", "bytes_lm", "ablations", "rates", "plot")
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--seeds", type=int, default=None, help=f"default: {SEEDS}")
    parser.add_argument("--quick", action="store_true", help="2 seeds, fewer steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw test loss against time here")
    arguments = parser.parse_args()
    if arguments.only == "plot" and not arguments.plot:
        parser.error("--only plot: say where, with --plot FILE.png")
    seeds = arguments.seeds or (2 if arguments.quick else SEEDS)
    if seeds < 2:
        parser.error("--seeds: a standard error needs 2 or more")
    images, text = DIGITS, BYTES
    if arguments.quick:
        images, text = (replace(t, steps=t.steps // 4) for t in (DIGITS, BYTES))
    tables = {
        "digits": lambda: compared(images, MAIN, seeds),
        "bytes_lm": lambda: compared(text, FEWER, seeds),
        "ablations": lambda: compared(images, ABLATIONS, seeds),
        "rates": lambda: rates(images, seeds),
    }
    wanted = (arguments.only,) if arguments.only else ("digits", "bytes_lm")
    tables = {name: rows for name, rows in tables.items() if name in wanted}
    found = {}
    for name, rows in tables.items():
        found[name] = []
        for row in rows():
            if not arguments.json:
                show(row, first=not found[name])
            found[name].append(row)
    if arguments.plot:
        found["plot"] = list(curves(images, min(seeds, 2)))
        draw(found["plot"], images, arguments.plot)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
