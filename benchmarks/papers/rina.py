"""Rina against a ring, a hierarchical all-reduce, a server and ATP, as more switches add up.

In virtual time: schedules are priced on links of 10 Gbit/s, with a start-up of 20 us a message
(half on either side of a switch), and switches that add up whatever comes. The core is
non-blocking (1:1: a rack's uplink is as fast as its links together) or oversubscribed (4:1).
*Throughput* is what all workers train in a second: the gradient in DDP's buckets of 25 MB, each
sent when it is ready, one after the other, beside backward. Where sums are integers (Rina, ATP)
each bucket's exponents are agreed on first, while buckets before it move.

ATP's server is a host of its own in rack 0, beside that rack's workers. *Its switch first*: that
rack's switch is upgraded first, which is best for it; *last*: it is upgraded last. *Beside
workers*: a shard of the server at each of them.

The tables ``emulated`` and ``atp-emulated`` are of two racks of four emulated hosts, real packets
and `paceline aggregate` beside their switches. Each collective is measured in turn, round after
round: a loop times one all-reduce at a time, from a barrier to the last rank's end. Where all
processes share few cores, these are the limit at high rates: a lower rate shows the network's
own order.
"""

import statistics
from functools import cache, partial

import torch

import paceline
from benchmarks.measure import harness
from benchmarks.papers.results import Claim, Paper, Quick, cell, formatted
from benchmarks.papers.rina_picture import draw_way
from paceline.bucketing.cost_models import AffineCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.cluster import Cluster, Rack, ServerHost, Workload
from paceline.collectives.communicator import Communicator
from paceline.collectives.in_network.algorithms import (
    agreement_of_ranks,
    blocks_of,
    is_sooner_at_switches,
)
from paceline.collectives.in_network.pricing import atp_sum, ring_of_racks_sum
from paceline.collectives.in_network.topology import (
    AtpTree,
    ServerPlace,
    beside_workers,
    ring_of_racks,
)
from paceline.collectives.registry import attach, make
from paceline.collectives.schedules import Ring, hierarchical
from paceline.collectives.timing import seconds
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation

SIZES = ((4, 4), (16, 8), (64, 16))
"""Racks, and workers in each."""
MODELS = ("resnet50", "vgg16")
CORES = {"1:1": 1, "4:1": 4}
LINK = 10e9 / 8
START_UP = 20e-6
SMALL, LARGE = 1_000_000, 100_000_000
"""Bytes at which a collective is priced: between and beyond, its price is a line."""

RING, HIERARCHICAL, SERVER = "ring", "hierarchical", "server"
FIRST, LAST = "ATP, its switch first", "ATP, its switch last"
SHARDS, RINA = "ATP, beside workers", "Rina"
ALGORITHMS = (RING, HIERARCHICAL, SERVER, FIRST, LAST, SHARDS, RINA)
INTEGERS = (FIRST, LAST, SHARDS, RINA)
COLOURS = ("#999999", "#b07aa1", "#e69f00", "#56b4e9", "#9ecae1", "#009e73", "#d55e00")


# ---- virtual time ----


def network(racks, workers, core, start_up):
    """Which racks add up is the schedules' affair here: switches take in all that comes."""
    uplink = workers * LINK / CORES[core]
    rack = Rack(workers=workers, link=LINK, latency=start_up, uplink=uplink)
    return Cluster((rack,) * racks, servers=(ServerHost(rack=0),))


def schedule(algorithm, size, racks, workers, upgraded):
    """Of *size* bytes where so many racks' switches are *upgraded*."""
    places = tuple(rack for rack in range(racks) for _ in range(workers))
    count = racks * workers
    first, last = tuple(range(upgraded)), tuple(range(racks - upgraded, racks))
    dedicated = (ServerPlace(rack=0),)
    if algorithm == RING or (algorithm == RINA and not upgraded):
        return Ring(count, size)
    if algorithm == HIERARCHICAL:
        return hierarchical(size, places)
    if algorithm == RINA:
        return ring_of_racks_sum(ring_of_racks(places, first), size)
    adding = {SERVER: (), FIRST: first, LAST: last, SHARDS: first}[algorithm]
    servers = beside_workers(places) if algorithm == SHARDS else dedicated
    return atp_sum(AtpTree(places, adding, servers), size)


@cache
def agreement(racks, workers, core, start_up):
    """The line of ranks that agree on exponents by themselves, by bytes of the gradient."""
    where, count = network(racks, workers, core, start_up), racks * workers
    return line(lambda size: seconds(agreement_of_ranks(size // 4, count), where))


def line(price):
    small, large = price(SMALL), price(LARGE)
    slope = (large - small) / (LARGE - SMALL)
    return AffineCost(small - slope * SMALL, slope)


@cache
def cost(algorithm, racks, workers, core, start_up, upgraded):
    """Of one all-reduce, by its bytes: how long it keeps the network busy, and how much later it
    begins because exponents are agreed on first."""
    where = network(racks, workers, core, start_up)

    def whole(size):
        return seconds(schedule(algorithm, size, racks, workers, upgraded), where)

    found = line(whole)
    if algorithm not in INTEGERS or (algorithm == RINA and not upgraded):
        return found, 0.0
    count, groups = racks * workers, upgraded + (racks - upgraded) * workers
    if algorithm == RINA and not is_sooner_at_switches(groups, count):
        more = agreement(racks, workers, core, start_up)
    else:
        more = line(lambda size: whole(4 * blocks_of(size // 4)))
    slope = found.seconds_per_byte + more.seconds_per_byte
    return AffineCost(found.start_up, slope), more.start_up


def steps_of(racks):
    """How many switches are upgraded."""
    return sorted({round(racks * part / 8) for part in range(9)} | {1, racks - 1})


def samples_a_second(algorithm, racks, workers, core, model, start_up, upgraded):
    workload = Workload.load(model)
    sizes, ready = workload.gradient_bytes, workload.ready_seconds
    price, later = cost(algorithm, racks, workers, core, start_up, upgraded)
    plan = plan_buckets("ddp", sizes)
    trained = racks * workers * workload.batch
    return trained / finish_time(plan, sizes, [t + later for t in ready], price)


def throughput(results, racks, workers, core, model, upgraded, start_up=START_UP):
    """Samples a second, by algorithm."""
    place = f"{racks} x {workers}, {core}, {model}, {1e6 * start_up:g} us"

    def measure():
        shape = (racks, workers, core, model, start_up, upgraded)
        return {one: samples_a_second(one, *shape) for one in ALGORITHMS}

    return results.values(
        f"{place}, {upgraded} switches",
        dict.fromkeys(ALGORITHMS, "samples/s"),
        measure,
    )


def gradient_ms(racks, workers, core, model, upgraded):
    """Of one sum of all gradients, by algorithm."""
    size = sum(Workload.load(model).gradient_bytes)
    costs = {
        one: cost(one, racks, workers, core, START_UP, upgraded) for one in ALGORITHMS
    }
    return {one: 1e3 * (later + price(size)) for one, (price, later) in costs.items()}


def partly(racks):
    """Numbers of switches of which some are upgraded and some are not."""
    return [count for count in steps_of(racks) if 0 < count < racks]


def least_over(other, racks, workers, core, model="resnet50"):
    """The least ratio of Rina's throughput to another's, with some switches upgraded."""

    def ours(results):
        found = [
            throughput(results, racks, workers, core, model, count)
            for count in partly(racks)
        ]
        return min(one[RINA] / one[other] for one in found)

    return ours


def throughput_table(model, core):
    def make(results):
        for racks, workers in SIZES:
            for count in steps_of(racks):
                found = throughput(results, racks, workers, core, model, count)
                row = {"racks x workers: upgraded": f"{racks} x {workers}: {count}"}
                yield row | found

    make.__doc__ = f"Samples a second of {model} by upgraded switches, core {core}."
    return make


def gradients(results):
    """Milliseconds of one sum of all gradients, by upgraded switches."""
    for model in MODELS:
        for core in CORES:
            for racks, workers in SIZES:
                for count in steps_of(racks):
                    row = {"model": model, "core": core}
                    row["racks x workers: upgraded"] = f"{racks} x {workers}: {count}"
                    yield row | gradient_ms(racks, workers, core, model, count)


def ratios(results):
    """Rina over others, with some switches upgraded at least and with all; whether it rises with each."""
    for racks, workers in SIZES:
        for core in CORES:
            for model in MODELS:
                found = [
                    throughput(results, racks, workers, core, model, count)
                    for count in steps_of(racks)
                ]
                some = [
                    throughput(results, racks, workers, core, model, count)
                    for count in partly(racks)
                ]
                rina = [one[RINA] for one in found]
                row = {"network": f"{racks} x {workers}, {core}", "model": model}
                for other in (RING, FIRST, LAST, SHARDS):
                    least = min(one[RINA] / one[other] for one in some)
                    whole = found[-1][RINA] / found[-1][other]
                    row[f"over {other}"] = f"{cell(least)}, {cell(whole)}"
                row["rises"] = "yes" if rina == sorted(rina) else "no"
                yield row


def start_ups(results):
    """Samples a second of ResNet-50 at 16 x 8, 1:1, with other start-ups of a message."""
    for start_up in (2e-6, START_UP, 200e-6):
        for count in steps_of(16):
            found = throughput(results, 16, 8, "1:1", "resnet50", count, start_up)
            row = {"start-up, us": 1e6 * start_up, "upgraded": count}
            yield row | {one: found[one] for one in (RING, RINA)}


def draw(results, path):
    """ResNet-50 in each network: throughput by upgraded switches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(SIZES), 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(CORES), len(SIZES), squeeze=False)
    for line_of, core in zip(panels, CORES, strict=True):
        for axes, (racks, workers) in zip(line_of, SIZES, strict=True):
            counts = steps_of(racks)
            found = [
                throughput(results, racks, workers, core, MODELS[0], count)
                for count in counts
            ]
            for algorithm, colour in zip(ALGORITHMS, COLOURS, strict=True):
                axes.plot(
                    counts,
                    [one[algorithm] for one in found],
                    marker="o",
                    markersize=3,
                    color=colour,
                    label=algorithm,
                    linewidth=2.4 if algorithm == RINA else 1.4,
                )
            axes.set_title(f"{racks} racks of {workers}, core {core}", fontsize=10)
            axes.set_ylim(bottom=0)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("switches that add up")
    for line_of in panels:
        line_of[0].set_ylabel("images a second")
    panels[0][0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)


# ---- real packets ----

RACKS, WORKERS = 2, 4
RATES = (50, 100, 200, 400)
"""Mbit/s."""
REPEATS = 5
AGGREGATED = (("ring", 0), ("rina", 1), ("rina", 2), ("atp", 2), ("switchml", 2))
"""A collective, and how many racks, from the first, have an aggregator."""
SERVED = (
    ("ring", 0, 0),
    *(("atp", aggregators, 1) for aggregators in (0, 1, 2)),
    *(("atp", aggregators, 0) for aggregators in (1, 2)),
)
"""A collective, how many racks, from the last, have an aggregator, and hosts for servers."""


def emulated_racks(mbit, adding, servers=0):
    """Racks of which those in *adding* have an aggregator; uplinks never limit."""
    racks = tuple(
        Rack(
            workers=WORKERS,
            link=mbit * 1e6 / 8,
            latency=50e-6,
            aggregates=number in adding,
        )
        for number in range(RACKS)
    )
    return Cluster(racks, servers=(ServerHost(rack=0),) * servers)


def times_of_sums(collective, size, repeats):
    """Seconds of each repeat, the slowest rank's."""
    runtime = join_runtime()
    runtime.connect()
    plain = Communicator(runtime, "barrier")
    comm = attach(make(collective), runtime, Communicator(runtime, collective))
    buffer = torch.randn(
        size // 4, generator=torch.Generator().manual_seed(runtime.rank)
    )
    times = []
    for repeat in range(repeats + 1):  # the first makes connections
        plain.all_reduce_natively(torch.zeros(1)).wait()
        start = paceline.now()
        comm.all_reduce(buffer, "mean").wait()
        took = torch.tensor([paceline.now() - start], dtype=torch.float64)
        plain.all_reduce_natively(took, "max").wait()
        if repeat:
            times.append(took.item())
    comm.close()
    return times


def predicted(cluster, collective, size):
    found = []

    def body(rank):
        paceline.init()
        times = times_of_sums(collective, size, 1)
        if rank == 0:
            found.extend(times)

    Simulation(cluster).run(body)
    return found[0]


def measured_in_turn(cases, size, repeats, rounds):
    """Predicted and measured seconds of each of *cases*: a collective and a cluster, by name."""
    times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (collective, cluster) in cases.items():
            times[name] += harness.on_emulated_hosts(
                cluster, times_of_sums, collective, size, repeats
            )
    figures = {}
    for name, (collective, cluster) in cases.items():
        figures[f"{name}, predicted"] = predicted(cluster, collective, size)
        figures[f"{name}, measured"] = statistics.median(times[name])
    return figures


def sums_on_packets(results, mbit, cases, megabytes, repeats, rounds):
    """The row of one rate: predicted and measured seconds of each case."""
    size = int(megabytes * 1e6) // 4 * 4
    names = [f"{name}, {what}" for name in cases for what in ("predicted", "measured")]
    found = results.values(
        f"emulated, {mbit} Mbit/s, {megabytes} MB, {rounds} rounds of {repeats}",
        dict.fromkeys(names, "s"),
        partial(measured_in_turn, cases, size, repeats, rounds),
    )
    row = {"rate": f"{mbit} Mbit/s"}
    for name in cases:
        both = (found[f"{name}, {what}"] for what in ("predicted", "measured"))
        row[name] = " / ".join(formatted(one, ".3f") for one in both)
    return row


def emulated(results):
    """Sums of 2 MB with aggregators in no, one and both of two emulated racks: predicted / measured s."""
    for mbit in RATES:
        cases = {
            f"{name}, {count} aggregators": (
                name,
                emulated_racks(mbit, range(count)),
            )
            for name, count in AGGREGATED
        }
        yield sums_on_packets(results, mbit, cases, 2, REPEATS, rounds=1)


def atp_emulated(results, mbit=4):
    """ATP with a dedicated server, and with shards beside workers, at 4 Mbit/s: predicted / measured s."""
    cases = {
        f"{name}, {count} aggregators{', a server' * servers}": (
            name,
            emulated_racks(mbit, range(RACKS - count, RACKS), servers),
        )
        for name, count, servers in SERVED
    }
    yield sums_on_packets(results, mbit, cases, 0.5, repeats=3, rounds=3)


# ---- what is claimed ----

SAYS = "more than 50 % higher throughput than ATP at the same hardware cost"
PAPER = Paper(
    name="rina",
    title="Rina: a ring of racks (ICNP 2024)",
    page="explanation/papers/rina.md",
    source="the paper's abstract, which compares Rina with ATP; on which hosts ATP's server ran there is unknown",
    claims=(
        *(
            Claim(
                row=f"throughput over ATP with a dedicated server, the least with 1 to {racks - 1} of {racks} switches upgraded, core {core}",
                says=SAYS,
                conditions=f"ResNet-50, {racks} racks of {workers}, 10 Gbit/s, start-up 20 us, the server's own switch is upgraded first",
                ours=least_over(FIRST, racks, workers, core),
                at_least=1.5,
                why_not="if many switches add up, few streams reach that server, and a fast core carries them",
            )
            for core in ("4:1", "1:1")
            for racks, workers in ((4, 4), (16, 8))
        ),
        *(
            Claim(
                row=f"throughput over ATP with shards beside workers, the least with 1 to 3 of 4 switches upgraded, core {core}",
                says=SAYS,
                conditions="ResNet-50, 4 racks of 4, 10 Gbit/s, start-up 20 us",
                ours=least_over(SHARDS, 4, 4, core),
                at_least=1.5,
                why_not="ATP's shards use all workers' links, so Rina has no bandwidth left to gain",
            )
            for core in ("4:1", "1:1")
        ),
    ),
    quick=(
        Quick(
            "4 x 4, core 4:1, some switches, over ATP with a dedicated server",
            least_over(FIRST, 4, 4, "4:1"),
            3.0,
        ),
    ),
    tables={
        **{
            f"{model}-{core.replace(':', 'to')}": throughput_table(model, core)
            for model in MODELS
            for core in CORES
        },
        "ratios": ratios,
        "gradients": gradients,
        "start-ups": start_ups,
        "emulated": emulated,
        "atp-emulated": atp_emulated,
    },
    pictures={"rina.png": draw, "rina_way.png": lambda results, path: draw_way(path)},
)
