"""Which row ``collective=auto`` takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import paceline
from paceline.cluster import Cluster
from paceline.collectives import autotune
from paceline.collectives.autotune import MARGIN, Auto, cheapest, measure
from paceline.collectives.communicator import (
    Communicator,
    ConnectionlessGroup,
    placement_of,
)
from paceline.collectives.registry import attach, make
from paceline.errors import UsageError
from paceline.interfaces import Placement
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from tests.support.simulations import cluster, rack, run

CPU = torch.device("cpu")
SWITCH = cluster(rack(8))
THIN = cluster(*[rack(4, uplink=25e6 / 8)] * 2)
FAR = cluster(*[rack(2, uplink=25e6 / 4, uplink_latency=5e-3)] * 3)
UNEVEN = cluster(rack(5, uplink=5e6), rack(2), rack(1))
ROWS = ("native", "ring", "tree", "halving-doubling", "hierarchical")


@pytest.mark.parametrize("where", [SWITCH, THIN, FAR, UNEVEN])
def test_auto_is_as_fast_as_the_fastest(where: Cluster) -> None:
    sizes = [1 << 10, 1 << 15, 1 << 20]

    def body(rank: int) -> list[list[float]]:
        runtime, found = join_runtime(), []
        for name in ("auto", *ROWS):
            comm = attach(make(name), runtime, Communicator(runtime, name))
            found.append([])
            for size in sizes:
                start = float(int(paceline.now()) + 1)  # together
                paceline.pace(start - paceline.now())
                comm.all_reduce(torch.zeros(size // 4), "sum").wait()
                found[-1].append(paceline.now() - start)
        return found

    of_ranks = torch.tensor(run(where, body), dtype=torch.float64)
    chosen, *rows = of_ranks.amax(0).tolist()
    for number, took in enumerate(chosen):
        times = [row[number] for row in rows]
        assert any(took == pytest.approx(time, rel=1e-9) for time in times)
        assert took <= min(times) / (1 - MARGIN), sizes[number]


def test_where_switches_add_up_large_messages_go_there() -> None:
    where = cluster(rack(4, aggregates=True), rack(4, aggregates=True))
    everybody, large = tuple(range(8)), 1 << 25
    # 1.25 of a link's time where both ways are busy, and a ring's 1.75.
    assert cheapest(where, everybody, large, switches=True) == "rina"
    assert cheapest(where, everybody, large) == "native"
    # Exponents and sums take two latencies in a row each, halving and doubling six.
    assert cheapest(where, everybody, 1 << 10, switches=True) == "rina"
    many = cluster(*[rack(2, aggregates=True)] * 8)
    small = cheapest(many, tuple(range(16)), 1 << 10, switches=True)
    assert small == "halving-doubling"
    assert cheapest(where, (0, 4), large, switches=True) == "native"
    assert cheapest(SWITCH, everybody, large, switches=True) == "native"

    def body(rank: int) -> tuple[torch.Tensor, float, list[str]]:
        runtime = join_runtime()
        row = Auto()
        comm = attach(row, runtime, Communicator(runtime, "auto"))
        buffer = torch.full((large // 400,), float(rank))
        start = paceline.now()
        comm.all_reduce(buffer, "sum").wait()
        at = comm.placement
        names = [row.choice(large, at), row.choice(large, at, at_switches=False)]
        return buffer, paceline.now() - start, names

    for buffer, took, names in run(where, body):
        assert names == ["rina", "native"]
        assert torch.allclose(buffer, torch.tensor(28.0))
        assert took < 1.4 * buffer.numel() * 4 / 25e6


@pytest.mark.parametrize(
    ("dtype", "operation", "at_switches"),
    [
        (torch.float32, "sum", True),
        (torch.complex64, "mean", True),
        (torch.int32, "sum", True),
        (torch.float32, "max", False),
        (torch.bfloat16, "sum", False),
        (torch.float16, "mean", False),
        (torch.float64, "sum", False),
        (torch.int64, "sum", False),
    ],
)
def test_switches_are_no_candidate_for_what_they_do_not_form(
    dtype, operation, at_switches
) -> None:
    """All other types take what is the cheapest without switches, and as long as that."""
    where = cluster(rack(4, aggregates=True), rack(4, aggregates=True))
    size = 1 << 18

    def took(name: str) -> float:
        def body(rank: int) -> float:
            runtime = join_runtime()
            comm = attach(make(name), runtime, Communicator(runtime, name))
            start = paceline.now()
            element = torch.empty(0, dtype=dtype).element_size()
            comm.all_reduce(torch.ones(size // element, dtype=dtype), operation).wait()
            return paceline.now() - start

        return max(run(where, body))

    assert took("auto") == pytest.approx(took("rina" if at_switches else "native"))


@pytest.mark.slow
def test_what_is_cheapest_by_hand() -> None:
    everybody = tuple(range(8))
    # On one switch: latency decides small ones; of large ones native is no dearer.
    assert cheapest(SWITCH, everybody, 1 << 10) == "halving-doubling"
    assert cheapest(SWITCH, everybody, 1 << 25) == "native"
    # 14 seconds of a link by ring and 9.5 by racks, where the uplink is an eighth.
    assert cheapest(THIN, everybody, 1 << 25) == "hierarchical"
    # Between far racks: a tree crosses once each way, a ring of three racks four times.
    assert cheapest(FAR, tuple(range(6)), 1 << 10) == "tree"
    assert cheapest(FAR, tuple(range(6)), 1 << 25) == "hierarchical"
    assert cheapest(THIN, (2,), 1 << 25) == "native"
    # In one of the racks nothing is thin.
    assert cheapest(THIN, (4, 5, 6, 7), 1 << 25) == "native"


def test_groups_are_priced_where_their_members_are() -> None:
    def body(rank: int) -> list[str]:
        runtime = join_runtime()
        comm = attach(make("auto"), runtime, Communicator(runtime, "auto"))
        mine = range(4) if rank < 4 else range(4, 8)
        chosen = [comm.collective.choice(1 << 25, comm.placement)]
        for group in (comm.group(mine), ConnectionlessGroup(comm, mine, "sends")):
            chosen.append(group.collective.choice(1 << 25, group.placement))
        return chosen

    assert run(THIN, body) == [["hierarchical", "native", "native"]] * 8


def test_a_size_is_priced_as_the_next_power_of_two(monkeypatch) -> None:
    asked: list[int] = []

    def note(
        cluster: Cluster, workers: tuple[int, ...], size: int, switches: bool
    ) -> str:
        asked.append(size)
        return "tree"

    monkeypatch.setattr(autotune, "cheapest", note)
    at = Placement.on(SWITCH)
    one = Auto()
    assert {one.choice(size, at) for size in (0, 1, 2, 3, 4, 1000, 1024)} == {"tree"}
    assert asked == [1, 2, 4, 1024]  # once each


def test_nothing_but_the_backend_runs_under_nccl(monkeypatch) -> None:
    """A schedule cannot be performed there, so none is priced, or tried."""
    native: list[str] = []
    comm = SimpleNamespace(
        size=8,
        follows_streams=True,
        placement=Placement.on(THIN),
        all_reduce_natively=lambda buffer, operation: native.append(operation),
    )
    one = Auto()
    assert one.setup(comm, None, torch.device("cuda")) == ""
    one.all_reduce(comm, SimpleNamespace(is_cuda=True), "sum")
    assert native == ["sum"]


def test_hierarchical_is_native_under_nccl() -> None:
    told: list[str] = []
    comm = SimpleNamespace(size=8, follows_streams=True, log=told.append)
    made = attach(make("hierarchical"), None, comm, device=torch.device("cuda"))
    assert made is comm
    assert len(told) == 1
    assert "native" in told[0]


def test_measuring_stops_before_it_takes_long(monkeypatch) -> None:
    """Each candidate takes 1 us a byte: the third size would take three seconds."""
    runtime = SimpleNamespace(tried=[], clock=SimpleNamespace(now=0.0))
    comm = SimpleNamespace(all_reduce_natively=lambda *of: run_one(*of))

    def run_one(buffer: torch.Tensor, operation: str) -> SimpleNamespace:
        if operation == "sum":
            runtime.clock.now += buffer.numel() * 4e-6
            runtime.tried.append(buffer.numel() * 4)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(
        autotune.Hierarchical,
        "all_reduce",
        lambda self, comm, *of: run_one(*of),
        raising=True,
    )
    for row in (autotune.Tree, autotune.HalvingDoubling):
        monkeypatch.setattr(row, "all_reduce", lambda self, comm, *of: run_one(*of))
    runtime.blank = lambda size, device: torch.zeros(size // 4)
    runtime.clock.stopwatch = lambda device: SimpleNamespace(
        mark=lambda: runtime.clock.now, seconds=lambda start, marks: [marks[0] - start]
    )
    curves = measure(comm, runtime, CPU)
    assert set(curves) == set(ROWS) - {"ring"}
    assert max(runtime.tried) == autotune.MEASURED[1]
    for curve in curves.values():
        assert curve(1 << 14) == pytest.approx(1e-6 * (1 << 14))
    assert runtime.clock.now < 2 * autotune.MOST_SECONDS


def test_what_was_measured_decides_and_noise_does_not() -> None:
    one = Auto()
    at = Placement((0, 1))
    assert one.choice(100, at) == "native"  # nothing is known of it
    curve = autotune.MeasuredCost
    one = Auto()
    one._measured = {
        "native": curve((1024, 1 << 20), (1e-3, 2e-2)),
        "tree": curve((1024, 1 << 20), (5e-4, 5e-2)),
        "hierarchical": curve((1024, 1 << 20), (9e-4, 1.95e-2)),
    }
    assert one.choice(1024, at) == "tree"
    assert one.choice(1 << 20, at) == "native"  # what is saved is within the margin


def test_a_described_cluster_of_another_size_is_refused() -> None:
    runtime = SimpleNamespace(size=4, cluster=THIN)
    with pytest.raises(UsageError, match="this job has 4"):
        placement_of(runtime)


def test_planned_buckets_are_priced_by_what_auto_takes(capsys) -> None:
    """The curve that the planner measures is the cheapest row's, at each size."""

    def curve(name: str) -> list[float]:
        def body(rank: int) -> tuple[float, ...]:
            model = torch.nn.Linear(512, 512, bias=False)  # 1 MiB
            optimizer = paceline.distribute(
                model, torch.optim.SGD(model.parameters(), lr=0.1), collective=name
            )
            cost = inspect(optimizer).tuner.measure_cost()
            optimizer.finish()
            return cost.seconds

        (seconds,) = set(run(FAR, body))
        return list(seconds)

    curves = {name: curve(name) for name in (*ROWS, "auto")}
    told = capsys.readouterr().err
    assert "collective=auto: tree to " in told
    assert "hierarchical beyond, as priced on the cluster" in told
    chosen = curves.pop("auto")
    least = [min(times) for times in zip(*curves.values(), strict=True)]
    close = 1.5 * MARGIN  # a curve is the mean over ranks, a price the last rank's
    assert chosen == pytest.approx(least, rel=close)
    # None of them alone is that: choosing is of use.
    assert all(times != pytest.approx(least, rel=close) for times in curves.values())
