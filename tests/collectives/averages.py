"""How averages are formed: laws that hold in every runtime, on three workers."""

from __future__ import annotations

import pytest
import torch

from paceline.collectives.autotune import CANDIDATES
from paceline.collectives.communicator import Communicator, ConnectionlessGroup
from paceline.collectives.registry import COLLECTIVES, attach, make
from paceline.runtimes.join import join_runtime
from tests.collectives.helpers import BUCKETS, buffers, skew


def every_collective_forms_the_same_mean(comm: Communicator) -> None:
    runtime = join_runtime()
    rank = comm.rank
    for name in COLLECTIVES:
        collective = make(name)
        if collective.needs == "servers":
            continue
        other = attach(collective, runtime, comm.channel(name))
        order: list[int] = []
        sums = [buffer.to(torch.int64) for buffer in buffers(rank)]
        pendings = []
        for index, buffer in enumerate(sums):

            def second(
                index: int = index,
                buffer: torch.Tensor = buffer,
                other=other,
                order=order,
            ):
                order.append(index)
                return other.all_reduce(buffer, "max")

            pendings.append(other.all_reduce(buffer, "sum").then(second))
            skew(rank, index)
        for pending in reversed(pendings):
            pending.wait()
        assert order == list(range(BUCKETS))
        for index, buffer in enumerate(sums):
            assert torch.equal(buffer, torch.full_like(buffer, 3 + 3 * index)), name
        mean = torch.tensor([[1.0 + rank, 3.0], [rank * rank, -1.0]])
        other.all_reduce(mean).wait()
        assert mean.tolist() == [[2.0, 3.0], [pytest.approx(5 / 3), -1.0]], name
        number = torch.tensor([complex(rank, 1)])
        other.all_reduce(number, "sum").wait()
        assert number.tolist() == [3 + 3j], name
        if rank < 2:
            pair = other.group((1, 0)).channel("inner")
            assert pair.collective is other.collective
            value = torch.tensor([5.0 + rank])
            pair.all_reduce(value, "sum").wait()
            assert value.item() == 11.0
        before = runtime.recorder.bytes_sent
        sent_in_bytes = 4 * 12 * 1024
        other.all_reduce(torch.zeros(sent_in_bytes // 4), "sum").wait()
        schedule = collective.schedule(sent_in_bytes, other.placement)
        assert runtime.recorder.bytes_sent - before == schedule.bytes_sent(rank)
        other.close()


def auto_takes_the_same_row_on_all_ranks(comm: Communicator) -> None:
    """In the whole and in groups, in the training's order and in works."""
    runtime, rank = join_runtime(), comm.rank
    auto = make("auto")
    other = attach(auto, runtime, comm.channel("auto"))
    if (
        comm.placement.cluster is None
    ):  # it was measured: all have the slowest one's times
        times = [auto._measured[name].seconds for name in sorted(auto._measured)]
        own = torch.tensor(times, dtype=torch.float64)
        most = own.clone()
        comm.all_reduce(most, "max").wait()
        assert torch.equal(own, most)
    others = [other, other.group((0, 1) if rank < 2 else (2,))]
    others.append(ConnectionlessGroup(other, range(3), f"{other.name}, everybody"))
    for one in others:
        names = list(CANDIDATES)
        for size in (1, 1000, 300_000):
            chosen = torch.tensor([names.index(auto.choice(4 * size, one.placement))])
            least, total = -chosen, torch.full((size,), float(one.rank + 1))
            pending = one.all_reduce(total, "sum").then(
                lambda one=one, total=total: one.all_reduce(total, "max")
            )
            one.all_reduce_natively(chosen, "max").wait()
            one.all_reduce_natively(least, "max").wait()
            assert torch.equal(chosen, -least)
            pending.wait()
            expected = one.size * (one.size + 1) / 2
            assert torch.equal(total, torch.full_like(total, expected))
    other.close()


CASES = (
    every_collective_forms_the_same_mean,
    auto_takes_the_same_row_on_all_ranks,
)
