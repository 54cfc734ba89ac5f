"""The page on all collectives, made from the registry."""

from __future__ import annotations

from paceline.collectives.registry import COLLECTIVES

_HEAD = """# Collectives

Made by `paceline list collectives` from the registry; do not edit. How the mean of a buffer over n workers is formed:
`distribute(collective="hierarchical")`, or `--method bsp:collective=hierarchical`.

| collective | formed by | sends | good for |
|---|---|---|---|
"""

_TAIL = """
## What carries them out

`ring`, `tree`, `halving-doubling` and `hierarchical` are schedules: lists of who sends which part to whom. One executor performs them, over
sends and receives, in real and in emulated processes; the simulated runtime moves the same lists in virtual time, to the same bits. A method's groups, gradients that
come later, compressed sums and the planner's measurements form their sums by the same row. `native` is torch.distributed's own all-reduce.

**hierarchical**, for a buffer S in racks of g ranks each, over links of rate b and uplinks of rate u per rack, r racks:

    seconds = 2 (g - 1) / g * S / b  +  2 (r - 1) / r * S / min(b g, u)      and latencies

where a ring of all ranks, rack by rack, takes `2 (n - 1) / n * S / min(b, u)`. With two racks of four whose uplink is as fast as a host, half, a quarter and an eighth of
that, it takes 1.43, 1.00, 0.79 and 0.68 of the ring's time: it is for uplinks thinner than their hosts' links together, and a ring that goes rack by rack crosses an
uplink only once. Racks may have different sizes, and ranks may be numbered in any way. A group inside one rack is a ring.
Under NCCL, which performs no schedules and picks an algorithm for the topology by itself, it is `native`. A line says so when training begins.

**auto** prices `native`, `tree`, `halving-doubling` and `hierarchical` where the cluster is known (simulated and emulated runtimes, and real jobs that were given a cluster
file): the seconds of each schedule on idle links, from `collectives/pricing.py`, which are those of the simulated runtime. The same choice on all ranks and in all runtimes, in each group by
where its members are; sizes up to the next power of two are one. Where nothing is known it times them at 1 KB to 4 MB when training begins, for about a second, and goes by the slowest
rank's times; which row it takes may then differ from run to run, and with it the last bits. It says which in one line. `native` is kept unless another one is more than
5 % cheaper, and always under NCCL, which chooses by itself. `rina` is a candidate for what switches form, where no rack has more than the 64 workers that one aggregator takes.

**rina**, **switchml** and **atp** form sums at switches, where something stands that adds up: `aggregates = true` in the cluster file, `paceline aggregate` in real jobs. Numbers
become 32-bit integers, so all ranks and runtimes have the same bits whatever switch has added what. Only float32 (with complex64) and sums of int32 are formed there: other types, and maxima, go around the ring, and so does
everything where no switch adds up. **bfloat16 and float16 go around the ring, too**, since at a switch they would be 4 bytes a number, and each rank would send more than the ring does: so `compression=bf16` and `fp16`, and models of
16 bits, gain nothing from a switch, and a line says so when training begins. They have no halves. See docs/rina.md.

**Measured** (`python benchmarks/collectives.py`, 8 emulated hosts, real processes, no latency to be emulated; rows in turn): on one switch at 400 Mbit/s, and in two racks of four
at 400 and 100 Mbit/s, the order of rows is as predicted in all 56 pairs whose predictions are clearly apart, at 1 KB, 1 MB and 32 MB. At 32 MB rows are within 6 % of
their price, but `native` in racks, which took 1.33 times as long, and `tree` on a switch, which took two thirds (its messages share links less than priced). Buffers of 1 KB cost up to twice their price where messages cross processors that are shared.

| seconds | ring | hierarchical | ring / hierarchical: priced | measured |
|---|---|---|---|---|
| two racks, 1 MB | 0.199 | 0.110 | 1.15 | 1.81 |
| two racks, 32 MB | 4.73 | 3.68 | 1.21 | 1.28 |
| a step of bsp, 8 MB in one bucket, racks at 100 and 25 Mbit/s | 5.32 | 4.01 | 1.25 | 1.31 |
| one switch, 32 MB | 1.135 | 1.131 | 1.00 | 1.00 |

(The third row: `python benchmarks/local_updates.py --only racks`.)
"""


def collectives_page() -> str:
    """Markdown: one row per registered collective, and what they have in common."""
    rows = []
    for name, cls in sorted(COLLECTIVES.items()):
        rows.append("| " + " | ".join([f"`{name}`", *cls.summary]) + " |")
    return _HEAD + "\n".join(rows) + "\n" + _TAIL
