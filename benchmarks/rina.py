"""Rina against a ring, a hierarchical all-reduce, a server and ATP, as more switches add up.

    python benchmarks/rina.py                       # tables, and what is in results/rina.json
    python benchmarks/rina.py --picture docs/rina.png
    python benchmarks/rina.py --racks 4 --workers 4 --start-up 200 --json
    python benchmarks/rina.py --emulated             # on real packets: see rina_emulated.py

In virtual time: schedules are priced on links of 10 Gbit/s, with a start-up of 20 us a message
(`--start-up`, microseconds; half on either side of a switch), and switches that add up whatever
comes. The core is non-blocking (1:1: a rack's uplink is as fast as its links together) or
oversubscribed (4:1). *Throughput* is what all workers train in a second: the gradient in DDP's buckets of 25 MB,
each sent when it is ready, one after the other, beside backward. Where sums are integers (Rina,
ATP) each bucket's exponents are agreed on first, while buckets before it move.

ATP's server is a host of its own in rack 0, beside that rack's workers. *Its switch first*: that
rack's switch is upgraded first, which is best for it; *last*: it is upgraded last. *Beside workers*:
a shard of the server at each of them.
"""

import argparse
import itertools
import json
import sys
from functools import cache
from pathlib import Path

from paceline.bucketing.cost_models import AffineCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.cluster import Cluster, Rack, ServerHost, Workload
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
from paceline.collectives.schedules import Ring, hierarchical
from paceline.collectives.timing import seconds

SIZES = ((4, 4), (16, 8), (64, 16))
"""Racks, and workers in each."""
MODELS = ("resnet50", "vgg16")
CORES = {"1:1": 1, "4:1": 4}
LINK = 10e9 / 8
START_UP = 20e-6
SMALL, LARGE = 1_000_000, 100_000_000
"""Bytes at which a collective is priced: between and beyond, its price is a line."""
RESULTS = Path(__file__).parent / "results" / "rina.json"

RING, HIERARCHICAL, SERVER = "ring", "hierarchical", "server"
FIRST, LAST = "ATP, its switch first", "ATP, its switch last"
SHARDS, RINA = "ATP, beside workers", "Rina"
WAYS = (RING, HIERARCHICAL, SERVER, FIRST, LAST, SHARDS, RINA)
INTEGERS = (FIRST, LAST, SHARDS, RINA)
COLOURS = ("#999999", "#b07aa1", "#e69f00", "#56b4e9", "#9ecae1", "#009e73", "#d55e00")


def network(racks, workers, core, start_up):
    """Which racks add up is the schedules' affair here: switches take in all that comes."""
    uplink = workers * LINK / CORES[core]
    rack = Rack(workers=workers, link=LINK, latency=start_up, uplink=uplink)
    return Cluster((rack,) * racks, servers=(ServerHost(rack=0),))


def schedule(way, size, racks, workers, upgraded):
    """Of *size* bytes where so many racks' switches are *upgraded*."""
    places = tuple(rack for rack in range(racks) for _ in range(workers))
    count = racks * workers
    first, last = tuple(range(upgraded)), tuple(range(racks - upgraded, racks))
    dedicated = (ServerPlace(rack=0),)
    if way == RING or (way == RINA and not upgraded):
        return Ring(count, size)
    if way == HIERARCHICAL:
        return hierarchical(size, places)
    if way == RINA:
        return ring_of_racks_sum(ring_of_racks(places, first), size)
    adding = {SERVER: (), FIRST: first, LAST: last, SHARDS: first}[way]
    servers = beside_workers(places) if way == SHARDS else dedicated
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


def cost(way, racks, workers, core, start_up, upgraded):
    """Of one all-reduce, by its bytes: how long it keeps the network busy, and how much later it
    begins because exponents are agreed on first."""
    where = network(racks, workers, core, start_up)

    def whole(size):
        return seconds(schedule(way, size, racks, workers, upgraded), where)

    found = line(whole)
    if way not in INTEGERS or (way == RINA and not upgraded):
        return found, 0.0
    count, groups = racks * workers, upgraded + (racks - upgraded) * workers
    if way == RINA and not is_sooner_at_switches(groups, count):
        more = agreement(racks, workers, core, start_up)
    else:
        more = line(lambda size: whole(4 * blocks_of(size // 4)))
    slope = found.seconds_per_byte + more.seconds_per_byte
    return AffineCost(found.start_up, slope), more.start_up


def steps_of(racks):
    """How many switches are upgraded."""
    return sorted({round(racks * part / 8) for part in range(9)} | {1, racks - 1})


def measure(racks, workers, core, start_up):
    rows = []
    for upgraded in steps_of(racks):
        costs = {
            way: cost(way, racks, workers, core, start_up, upgraded) for way in WAYS
        }
        for model in MODELS:
            workload = Workload.load(model)
            sizes, ready = workload.gradient_bytes, workload.ready_seconds
            plan = plan_buckets("ddp", sizes)
            trained = racks * workers * workload.batch
            rows.append(
                {
                    "racks": racks,
                    "workers": workers,
                    "core": core,
                    "start_up": start_up,
                    "upgraded": upgraded,
                    "model": model,
                    "gradient_ms": {
                        way: 1e3 * (later + price(sum(sizes)))
                        for way, (price, later) in costs.items()
                    },
                    "throughput": {
                        way: trained
                        / finish_time(plan, sizes, [t + later for t in ready], price)
                        for way, (price, later) in costs.items()
                    },
                }
            )
    return rows


def judge(rows):
    """What is wanted of Rina, and what came out, in each network and model."""
    found = []
    keys = ("racks", "workers", "core", "start_up", "model")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        mine = [row for row in rows if tuple(row[k] for k in keys) == key]
        partly = [row for row in mine if 0 < row["upgraded"] < row["racks"]]
        rina = [row["throughput"][RINA] for row in mine]
        found.append(
            {
                **dict(zip(keys, key, strict=True)),
                "rises": all(a < b for a, b in itertools.pairwise(rina)),
                **{
                    f"least over {way}": min(
                        row["throughput"][RINA] / row["throughput"][way]
                        for row in partly
                    )
                    for way in WAYS[:-1]
                },
                **{
                    f"upgraded over {way}": mine[-1]["throughput"][RINA]
                    / mine[-1]["throughput"][way]
                    for way in WAYS[:-1]
                },
            }
        )
    return found


def show(rows, verdicts):
    for verdict in verdicts:
        mine = [
            row for row in rows if all(row[k] == verdict[k] for k in list(verdict)[:5])
        ]
        print(
            f"\n## {verdict['racks']} x {verdict['workers']}, core {verdict['core']}, "
            f"{verdict['model']}: samples a second (ms of one gradient)\n"
        )
        print(f"| switches | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 1)}")
        for row in mine:
            cells = [
                f"{number(row['throughput'][way])} ({number(row['gradient_ms'][way])})"
                for way in WAYS
            ]
            print(f"| {row['upgraded']} | {' | '.join(cells)} |")
        least = ", ".join(
            f"{way} {verdict[f'least over {way}']:.2f}" for way in WAYS[:-1]
        )
        whole = ", ".join(
            f"{way} {verdict[f'upgraded over {way}']:.2f}" for way in WAYS[:-1]
        )
        print(f"\nRina over others, partly upgraded, at least: {least}")
        print(f"All upgraded: {whole}. Rises with each: {verdict['rises']}")


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(rows, path):
    """ResNet-50 in each network: throughput by upgraded switches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((r["racks"], r["workers"]) for r in rows))
    figure = Figure(figsize=(4.2 * len(shapes), 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(CORES), len(shapes), squeeze=False)
    for line_of, core in zip(panels, CORES, strict=True):
        for axes, (racks, workers) in zip(line_of, shapes, strict=True):
            mine = [
                r
                for r in rows
                if (r["racks"], r["workers"], r["core"], r["model"])
                == (racks, workers, core, MODELS[0])
            ]
            for way, colour in zip(WAYS, COLOURS, strict=True):
                axes.plot(
                    [r["upgraded"] for r in mine],
                    [r["throughput"][way] for r in mine],
                    marker="o",
                    markersize=3,
                    color=colour,
                    label=way,
                    linewidth=2.4 if way == RINA else 1.4,
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--racks", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--start-up", type=float, default=1e6 * START_UP)
    parser.add_argument("--picture", type=Path, help="where to draw the plot")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = SIZES if options.racks is None else ((options.racks, options.workers),)
    rows = [
        row
        for racks, workers in sizes
        for core in CORES
        for row in measure(racks, workers, core, options.start_up / 1e6)
    ]
    verdicts = judge(rows)
    if options.picture:
        draw(rows, options.picture)
    if options.racks is None and options.start_up == 1e6 * START_UP:
        options.results.write_text(
            json.dumps({"rows": rows, "verdicts": verdicts}, indent=1) + "\n"
        )
    if options.json:
        json.dump(verdicts, sys.stdout, indent=1)
    else:
        show(rows, verdicts)


if __name__ == "__main__":
    if "--emulated" in sys.argv:
        import rina_emulated

        rina_emulated.main([word for word in sys.argv[1:] if word != "--emulated"])
        sys.exit()
    main()
