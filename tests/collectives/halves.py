"""All-reduces in two halves: laws that hold in every runtime, on any number of workers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from paceline.collectives.communicator import Communicator
from paceline.collectives.reduce_scatter import NativeReduceScatter, reduce_scatter
from paceline.collectives.registry import attach, make
from paceline.interfaces.buckets import wire_bytes
from paceline.runtimes.join import join_runtime
from tests.collectives.helpers import skew

SCHEDULES = ("ring", "hierarchical", "halving-doubling", "tree")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float64)
SIZES = (1, 2, 7, 1001)


def random(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Of different magnitudes: each order of additions rounds in its own way."""
    draw = torch.Generator().manual_seed(1000 * rank + size)
    values = torch.randn(size, dtype=torch.complex64, generator=draw)
    values *= torch.pow(10.0, 2 * torch.rand(size, generator=draw))
    return (values if dtype.is_complex else values.real.contiguous()).to(dtype)


def two_halves_are_the_whole(comm: Communicator) -> None:
    """To the bit, in whatever order they are gathered; native's are the ring's."""
    runtime, rank = join_runtime(), comm.rank
    wholes = {
        name: attach(make(name), runtime, comm.channel(f"{name}, whole"))
        for name in SCHEDULES
    }
    for row in ("native", "auto", *SCHEDULES):
        halves = attach(make(row), runtime, comm.channel(f"{row}, halves"))
        held, expected, scattered = [], [], []
        for number, (size, dtype) in enumerate(product(SIZES, DTYPES)):
            buffer, operation = random(size, dtype, rank), ("sum", "mean")[number % 2]
            name = row
            if row == "auto":
                name = halves.collective.choice(wire_bytes(buffer), halves.placement)
            whole = wholes["ring" if name == "native" else name]
            expected.append(buffer.clone())
            pending = whole.all_reduce(expected[-1], operation)
            held.append(buffer)
            scattered.append(reduce_scatter(halves, buffer, operation))
            pending.wait()
            skew(rank, number)
        draw = torch.Generator().manual_seed(5)
        order = torch.randperm(len(held), generator=draw).tolist()
        pendings = [(number, scattered[number].gather()) for number in order]
        for number, pending in reversed(pendings):
            pending.wait()
            pending.wait()
            assert torch.equal(held[number], expected[number]), (row, number)
        halves.close()
    for whole in wholes.values():
        whole.close()


def halves_send_as_much_as_the_whole(comm: Communicator) -> None:
    runtime, n = join_runtime(), comm.size
    recorder = runtime.recorder
    for row in ("native", *SCHEDULES):
        collective = make(row)
        other = attach(collective, runtime, comm.channel(f"{row}, counted"))
        for size in (1, 5, 1200):
            buffer = torch.zeros(size)
            start = recorder.bytes_sent
            under_way = reduce_scatter(other, buffer, "sum")
            first = recorder.bytes_sent - start
            under_way.gather().wait()
            both = recorder.bytes_sent - start
            schedule = collective.schedule(size, other.placement)
            assert both == 4 * schedule.bytes_sent(comm.rank)
            if row in ("native", "ring") and size % n == 0:
                assert 2 * first == both
        other.close()


def gathers_start_in_the_order_of_asking(comm: Communicator) -> None:
    """Asked for before, between and after the scatters, while others are issued; what follows
    a gather sees the whole result."""
    channel = comm.channel("orders")
    rank, n = comm.rank, comm.size
    held = [torch.full((size,), float(rank + 1)) for size in (50_000, 3, 1, 20_000, 9)]
    order: list[int] = []
    ends = []
    under_way = {}

    def gather(number: int) -> None:
        def note() -> None:
            assert torch.equal(held[number], torch.full_like(held[number], total))
            order.append(number)

        total = n * (n + 1) / 2
        ends.append(under_way.pop(number).gather().then(note))

    for number, buffer in enumerate(held):
        skew(rank, number)
        under_way[number] = reduce_scatter(channel, buffer, "sum")
        if number % 2:
            gather(number)
    for number in (4, 0, 2):
        gather(number)
    for pending in ends[::-1]:
        pending.wait()
    assert order == [1, 3, 4, 0, 2]
    channel.close()


def own_halves_are_the_mean(comm: Communicator) -> None:
    """As under NCCL, where no schedule is performed; in the whole numbers that have one sum."""
    n, rank = comm.size, comm.rank
    channel = comm.channel("own halves")
    for size in (1, n, 3 * n, 1001):
        held = (torch.arange(size) + rank).to(torch.float64)
        number = torch.full((size,), complex(rank, 1.0))
        pendings = [
            NativeReduceScatter(channel, buffer, "sum").gather()
            for buffer in (held, number)
        ]
        for pending in pendings:
            pending.wait()
            pending.wait()
        ranks = n * (n - 1) // 2
        assert torch.equal(held, (n * torch.arange(size) + ranks).to(torch.float64))
        assert number.tolist() == [pytest.approx(complex(ranks, n))] * size
    channel.close()


CASES = (
    two_halves_are_the_whole,
    halves_send_as_much_as_the_whole,
    gathers_start_in_the_order_of_asking,
    own_halves_are_the_mean,
)
