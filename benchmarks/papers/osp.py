"""OSP: what two stages gain where the network costs r times the computing, and what they cost.

*Speed*: eight workers (and a server on a host of its own), eight equal layers of 8 MiB, 0.1 s
forward and 0.2 s backward, virtual time. r is what the textbook form (everything sent after
backward, one method of its own: server or ring) spends beyond computing, over computing; the
link is chosen so. Speed-ups are of seconds a step, over the last 40 of 140 steps. The plan has
settled by then, and the whole budget with ``budget=constant``. osp as it comes has a quarter of
its budget then: no loss is told, and it grows over 500 steps. So it is measured again over
steps 501 to 540. The model of the textbook form, for a part u of the bytes deferred, is
(1 + r) / (1 + (1 - u) r + max(0, u r - 1)).

*Accuracy*: as many steps as bsp, paired seed by seed: the same initial model, the same batches.
*digits* is the CNN of examples/digits.py, batches of 64, 150 steps of SGD with momentum 0.9, the
learning rate falling linearly from 0.05 to 0; its figure is a mean over the last 5 evaluations,
5 steps apart, in which one of the 360 test images is 0.28 points. *bytes_lm* is the byte model
with 400 steps of AdamW, batches of 32, one cycle up to 0.01. A method is inside if its mean
paired difference to bsp is within 2 standard errors of 0, and within 0.3 points, or 0.5 % of
bsp's bits per byte. Two standard errors of 5 seeds are passed by chance in one row of nine. The
control has to be outside: everything deferred and no correction.

A bucket per tensor, sent while backward runs, over links on which sending takes as long as
computing. "deferred" is the part of all gradient bytes that travelled in stage 2. "speed-up" is
of the same runs: virtual seconds that bsp takes (beside a server: bsp over a server) over those
of the row, from the first step to the first evaluation, in which little may be deferred yet.
"""

import copy
import math
import statistics
from dataclasses import dataclass, field, fields, replace

import torch

import paceline
from benchmarks.measure import accuracy_tasks
from benchmarks.measure.accuracy import BASE, SEEDS, marked, standard_error, verdict
from benchmarks.measure.accuracy_tasks import digits
from benchmarks.papers.osp_comparisons import KINDS
from benchmarks.papers.results import Claim, Paper, Quick, formatted
from paceline import methods, spec
from paceline.cluster import Cluster, Rack, ServerHost, Workload
from paceline.methods.osp import OSP
from paceline.runtimes.simulated import ComputeModel, Simulation

WORKERS = 8
LATENCY = 50e-6
NATIVE = "osp:collective=native"
CONSTANT = f"{NATIVE},budget=constant"
SERVER_BSP = "bsp:collective=parameter-server"


# ---- speed ----

LAYERS = 8
STEPS, LAST = 140, 40
GROWN = 540
"""Steps after which the budget of osp as it comes has grown."""
RATIOS = (0.25, 0.5, 1, 2, 4)
PARTS = (0.25, 0.5, 0.8, 1)
EQUAL = Workload(
    names=tuple(f"layer{number}" for number in range(LAYERS)),
    sizes=(8 * 2**20,) * LAYERS,
    forward=(0.1 / LAYERS,) * LAYERS,
    backward=(0.2 / LAYERS,) * LAYERS,
)
COMPUTE = EQUAL.forward_seconds + EQUAL.backward_seconds
SERVER_METHODS = (
    "osp",
    "osp:budget=constant",
    "osp:budget=constant,servers=per-node",
    f"{SERVER_BSP},servers=per-node",
    "asp",
    "ssp",
    "r2sp",
)


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


def step(results, place, method, workload, link, buckets, steps=STEPS, last=LAST):
    """Seconds of a step at a *place*, which says what workload and link are; kept."""
    server_hosts = 0 if "per-node" in method else 1
    row = f"{place}, {method}, buckets={buckets}, steps {steps - last + 1} to {steps}"
    return results.value(
        row,
        "s",
        lambda: seconds(method, workload, link, buckets, server_hosts, steps, last),
    )


def textbook_step(results, r, method, steps, last):
    place = f"textbook, r = {r:g}"
    link = one_message_link(r)
    return step(results, place, method, EQUAL, link, "single", steps, last)


def textbook_bsp(results, r):
    method = f"{SERVER_BSP},overlap=false"
    return textbook_step(results, r, method, steps=12, last=6)


def textbook_speed_up(results, r, part):
    method = f"osp:overlap=false,defer=most,most={part},budget=constant"
    osp = textbook_step(results, r, method, steps=60, last=20)
    return textbook_bsp(results, r) / osp


def server_step(results, r, method, steps=STEPS, last=LAST):
    place = f"server, r = {r:g}"
    return step(results, place, method, EQUAL, server_link(r), "wfbp", steps, last)


def native_step(results, r, method, steps=STEPS, last=LAST):
    place = f"ring, r = {r:g}"
    return step(results, place, method, EQUAL, ring_link(r), "optimal", steps, last)


def textbook(results):
    """The paper's form, stage 1 after backward, against its model, by the part deferred."""
    for r in RATIOS:
        measured_r = (textbook_bsp(results, r) - COMPUTE) / COMPUTE
        row = {"r": measured_r}
        for u in PARTS:
            row[f"u={u}"] = textbook_speed_up(results, r, u)
            # Pieces of 4 MiB: what can be had of u.
            row[f"model u={u}"] = model(measured_r, int(u * 16) / 16)
        yield row


def server(results):
    """Overlapped, over a parameter server, against overlapped bsp over one."""
    for r in RATIOS:
        base = server_step(results, r, SERVER_BSP, steps=12, last=6)
        row = {"r": r, "bsp seconds": base}
        for method in SERVER_METHODS:
            row[method] = base / server_step(results, r, method)
        grown = server_step(results, r, "osp", steps=GROWN)
        yield row | {f"osp, until step {GROWN}": base / grown}


def native(results):
    """By all-reduce, against bsp with its best plan."""
    for r in RATIOS:
        base = native_step(results, r, "bsp")
        row = {"r": r, "bsp seconds": base}
        for method in (NATIVE, CONSTANT):
            row[method] = base / native_step(results, r, method)
        grown = native_step(results, r, NATIVE, steps=GROWN)
        yield row | {f"{NATIVE}, until step {GROWN}": base / grown}


def workloads(results):
    """ResNet-50, VGG-16 and BERT-base at 1, 10 and 25 Gbit/s."""
    for name in ("resnet50", "vgg16", "bert-base"):
        workload = Workload.load(name)
        for gbit in (1, 10, 25):
            place, link = f"{name}, {gbit} Gbit/s", gbit * 1e9 / 8

            def took(method, buckets, steps=100, last=20, at=(place, workload, link)):
                where, what, rate = at
                return step(results, where, method, what, rate, buckets, steps, last)

            ring = took("bsp", "optimal")
            pushed = took(SERVER_BSP, "ddp", steps=12, last=6)
            yield {
                "workload": name,
                "Gbit/s": gbit,
                "r": ring_seconds(workload, link) / compute(workload),
                "bsp seconds": ring,
                CONSTANT: ring / took(CONSTANT, "optimal"),
                "server-bsp seconds": pushed,
                "osp:budget=constant": pushed / took("osp:budget=constant", "ddp"),
            }


# ---- accuracy: what is trained ----

FORWARD, BACKWARD = 0.1, 0.2
EVALUATIONS, APART = 5, 5
ALL = "defer=most,most=1,budget=constant"
MOST = "defer=most,most=0.8,budget=constant"
MAIN = {
    "as it comes, native": NATIVE,
    "budget=constant, native": CONSTANT,
    "as it comes, server": "osp",
    "budget=constant, server": "osp:budget=constant",
    "ramp=50, native": f"{NATIVE},ramp=50",
    "everything deferred, native": f"{NATIVE},{ALL}",
    "everything deferred, server": f"osp:{ALL}",
    "everything, average": f"{NATIVE},{ALL},compared=average",
    "everything, plain": f"{NATIVE},{ALL},compared=plain",
    "everything, correction=none (control)": f"{NATIVE},{ALL},correction=none",
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


# ---- accuracy: one training ----


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


def watched(cls, noted):
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
                    noted.append(late / sum(layout.sizes))

            worker.after_update = after_update
            return worker

    return Watched


def method_of(text, noted):
    """A method object, watched if it is osp; and what else the spec says. The key *compared*
    names what osp is compared with."""
    method, rest = methods.make(spec.parse(text), {"collective", "compared"})
    if isinstance(method, OSP):
        cls = watched(KINDS.get(rest.pop("compared", None), OSP), noted)
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
    method, rest = method_of(text, trained.deferred)
    rate = task.rate if rate is None else rate

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
        for number in range(1, task.steps + 1):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = task.loss(model(x), y)
            loss.backward()
            optimizer.step(loss=loss)
            schedule.step()
            if rank:
                continue
            trained.ends.append(paceline.now())
            if number in evaluations:
                with optimizer.consolidated():
                    to_evaluate.load_state_dict(model.state_dict())
                trained.figures[number] = task.evaluate(to_evaluate)
        optimizer.finish()

    rack = Rack(workers=WORKERS, link=link_of(task, text), latency=LATENCY)
    compute = ComputeModel(forward=FORWARD, backward=BACKWARD, jitter=jitter)
    cluster = Cluster((rack,), servers=(ServerHost(),))
    Simulation(cluster, compute=compute).run(body)
    return trained


# ---- accuracy: tables ----


def last_steps(task):
    if task.name == "bytes_lm":
        return {task.steps}
    return {task.steps - APART * n for n in range(EVALUATIONS)}


def trained_figures(results, task, text, seed, rate=None):
    """The figures of a training, the part deferred, and the seconds until it is first evaluated."""
    rate = task.rate if rate is None else rate

    def run():
        trained = train(task, text, seed, last_steps(task), rate)
        return {
            **{name: trained.figure(name) for name in task.figures},
            "deferred": statistics.fmean(trained.deferred or [0.0]),
            "seconds": trained.ends[min(last_steps(task)) - 2],
        }

    return results.values(
        trained_row(task, text, rate, seed),
        task.figures | {"deferred": "part of bytes", "seconds": "s"},
        run,
    )


def trained_row(task, text, rate, seed):
    return f"{task.name}, {text}, rate {rate:g}, seed {seed}"


def compared(results, task, named, seeds=SEEDS, rate=None):
    """A row for bsp, and one per method of *named* with its paired differences."""

    def runs(text):
        return [
            trained_figures(results, task, text, seed, rate) for seed in range(seeds)
        ]

    base = runs(BASE)
    yield row_of(task, BASE, base, base) | {"speed-up": 1.0}
    for name, text in named.items():
        mine = runs(text)
        # Times do not depend on seeds, and a server's bsp learns what bsp learns.
        beside = base if by_ring(text) else seeds * [server_bsp(results, task, rate)]
        gains = (b["seconds"] / m["seconds"] for b, m in zip(beside, mine, strict=True))
        yield row_of(task, name, mine, base) | {"speed-up": statistics.fmean(gains)}


def server_bsp(results, task, rate):
    return trained_figures(results, task, SERVER_BSP, 0, rate)


def difference(task, figure, mine, base):
    """The mean paired difference of a figure to bsp's, and its standard error."""
    ours, theirs = ([one[figure] for one in runs] for runs in (mine, base))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if task.relative:
        mean = statistics.fmean(theirs)
        differences = [100 * d / mean for d in differences]
    return statistics.fmean(differences), standard_error(differences)


def row_of(task, name, mine, base):
    row = {"method": name}
    row["deferred"] = formatted(
        statistics.fmean(one["deferred"] for one in mine), ".0%"
    )
    for number, figure in enumerate(task.figures):
        off, error = difference(task, figure, mine, base)
        row[figure] = formatted(statistics.fmean(one[figure] for one in mine), ".3f")
        unit = "%" if task.relative else "points" if number == 0 else ""
        if name != BASE:
            row[f"{figure}: difference {unit}".strip()] = off, error
        if number == 0 and name != BASE:
            row["verdict"] = "" if math.isnan(off) else verdict(task, off, error)
    return row


def digits_table(results):
    """Digits: accuracy against bsp's and the speed-up of the same runs."""
    return compared(results, DIGITS, MAIN)


def bytes_table(results):
    """bytes_lm: bits per byte against bsp's and the speed-up of the same runs."""
    return compared(results, BYTES, FEWER)


SHOWN = {
    "`osp:collective=native`": "as it comes, native",
    "`budget=constant`, native": "budget=constant, native",
    "`ramp=50`, native": "ramp=50, native",
    f"`{ALL}`, native": "everything deferred, native",
    "the same, *plain*": "everything, plain",
    "the same, *average*": "everything, average",
    "the same, `correction=none`": "everything, correction=none (control)",
    "`osp`, over a server": "as it comes, server",
    "`budget=constant`, over a server": "budget=constant, server",
    f"`{ALL}`, over a server": "everything deferred, server",
}
"""Rows of the docs, and their names in `MAIN`."""
PARTS_OF_SUMMARY = {
    "deferred": "part of bytes",
    "speed-up": "",
    "difference": "",
    "standard error": "",
}


def summary_row(task, text):
    return f"{task.name}, {text}, {SEEDS} seeds"


def summary(results, task, text):
    """Stored means over seeds: of their trainings, or of a printed table where these are not stored."""
    wanted = [trained_row(task, text, task.rate, seed) for seed in range(SEEDS)]
    wanted += [trained_row(task, BASE, task.rate, seed) for seed in range(SEEDS)]
    if not by_ring(text):
        wanted.append(trained_row(task, SERVER_BSP, task.rate, 0))
    if not all(results.has(f"{row}: seconds") for row in wanted):
        row = summary_row(task, text)
        return {part: results.stored(f"{row}: {part}") for part in PARTS_OF_SUMMARY}
    _, found = compared(results, task, {"": text})
    mine = [trained_figures(results, task, text, seed) for seed in range(SEEDS)]
    base = [trained_figures(results, task, BASE, seed) for seed in range(SEEDS)]
    off, error = difference(task, next(iter(task.figures)), mine, base)
    return {
        "deferred": statistics.fmean(one["deferred"] for one in mine),
        "speed-up": found["speed-up"],
        "difference": off,
        "standard error": error,
    }


def accuracy_table(results):
    """Digits and bytes_lm: what is stored of their tables, as the docs show it; measures nothing."""
    for name, key in SHOWN.items():
        row = {"osp": name}
        for task, unit in ((DIGITS, "points"), (BYTES, "bits per byte")):
            found = summary(results, task, MAIN[key])
            cells = ("", "", "")
            if not math.isnan(found["difference"]):
                off = marked(task, found["difference"], found["standard error"])
                cells = (f"{found['deferred']:.0%}", f"{found['speed-up']:.2f}", off)
            titles = (f"{task.name}: deferred", f"{task.name}: speed-up", unit)
            row |= dict(zip(titles, cells, strict=True))
        yield row


def ablations(results):
    """Digits: what to defer, and when."""
    return compared(results, DIGITS, ABLATIONS)


def rates(results):
    """Digits at higher learning rates: how far OSP, and what is stale without it, hold out."""
    chosen = ("everything deferred, native", "everything, correction=none (control)")
    for rate in RATES:
        named = {name: MAIN[name] for name in chosen}
        for row in compared(results, DIGITS, named, rate=rate):
            yield row | {"method": f"{row['method']} at {rate:g}"}


# ---- the picture ----

PANELS = {
    "over a server": {
        "bsp": SERVER_BSP,
        "asp": "asp",
        "ssp": "ssp",
        "r2sp": "r2sp",
        "osp": "osp",
        "osp, budget=constant": "osp:budget=constant",
    },
    "by all-reduce": {"bsp": "bsp", "osp": NATIVE, "osp, budget=constant": CONSTANT},
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


def curve(task, text, seeds=2, every=10):
    """Seconds, and the mean test loss then. Times are of a run without evaluations, which make
    osp wait for its stage 2."""
    times = train(task, text, 0, (), jitter=JITTER).ends
    steps = range(every, task.steps + 1, every)
    runs = [train(task, text, seed, steps, jitter=JITTER) for seed in range(seeds)]
    losses = [
        statistics.fmean(run.figures[number]["test loss"] for run in runs)
        for number in steps
    ]
    return [times[number - 1] for number in steps], losses


def draw(results, path):
    """Test loss against virtual time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    both = figure.subplots(1, 2, sharey=True)
    for axes, (panel, named) in zip(both, PANELS.items(), strict=True):
        for name, text in named.items():
            colour, dash, width, label = STYLES[name]
            axes.plot(
                *curve(DIGITS, text),
                label=label,
                color=colour,
                linestyle=dash,
                linewidth=width,
                marker="o",
                markevery=[-1],
                markersize=6,
            )
        link = link_of(DIGITS, named["bsp"]) * 8 / 1e6
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
        f"digits' CNN, 8 workers, {DIGITS.steps} steps of each method; "
        "sending takes as long as computing",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)


# ---- what is claimed ----


def native_speed_up(results):
    """As it comes, once its budget has grown."""
    base = native_step(results, 1, "bsp")
    return base / native_step(results, 1, NATIVE, steps=GROWN)


def quick_speed_up(results):
    """Few steps: the plan and a constant budget have settled."""
    few = {"steps": 80, "last": 20}
    base = native_step(results, 1, "bsp", **few)
    return base / native_step(results, 1, CONSTANT, **few)


def points(results):
    """Of accuracy on digits, as it comes, native, against bsp."""
    mine, base = (
        [trained_figures(results, DIGITS, text, seed) for seed in range(SEEDS)]
        for text in (NATIVE, BASE)
    )
    return difference(DIGITS, "accuracy", mine, base)


PAPER = Paper(
    name="osp",
    title="OSP: synchronization in two stages (ICPP 2023)",
    page="explanation/papers/osp.md",
    source="the paper's abstract (we do not know its models, baselines and networks)",
    claims=(
        Claim(
            row="throughput of the paper's form (stage 1 after backward), 80 % deferred",
            says="up to 50 % more than popular synchronization models",
            conditions="8 workers, one server, sending takes as long as computing; compared with bsp of the same form",
            ours=lambda results: textbook_speed_up(results, 1, 0.8),
            at_least=1.5,
        ),
        Claim(
            row="throughput of `osp:collective=native`, steps 501 to 540",
            says="up to 50 % more than popular synchronization models",
            conditions="8 workers, an all-reduce takes as long as computing; compared with `bsp` with its best plan",
            ours=native_speed_up,
            at_least=1.5,
            why_not="this `bsp` already hides gradients behind backward",
        ),
        Claim(
            row="accuracy of `osp:collective=native` against bsp, five seeds",
            says="no accuracy loss",
            conditions="digits' CNN, 150 steps; no loss: less than 0.3 points",
            ours=points,
            at_least=-0.3,
            unit="points",
        ),
    ),
    quick=(
        Quick(
            "native, budget=constant, r = 1, over bsp's best plan", quick_speed_up, 1.35
        ),
    ),
    tables={
        "textbook": textbook,
        "server": server,
        "native": native,
        "workloads": workloads,
        "digits": digits_table,
        "bytes_lm": bytes_table,
        "accuracy": accuracy_table,
        "ablations": ablations,
        "rates": rates,
    },
    pictures={"osp_accuracy.png": draw},
)
