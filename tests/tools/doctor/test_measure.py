"""What an examination finds in simulated time, where the truth is known."""

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.cluster.cluster import throttle
from paceline.cluster.profiling.step_phases import StepWatch
from paceline.core import broadcast
from paceline.errors import UsageError
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.tools.doctor.measure import (
    examine_simulated_network,
    examine_simulation,
)

LINK = 25e6


def rack(workers, **keys):
    return Rack(workers=workers, link=LINK, latency=1e-4, **keys)


def examine(cluster, body, **compute):
    """The evidence of a training, and nothing else."""
    found = []
    simulation = Simulation(cluster, compute=ComputeModel(**compute))
    examine_simulation(simulation, found.append, 0.05)
    simulation.run(body)
    return found[0]


def trains(steps=8, layers=4, width=64, method="bsp:buckets=wfbp", before=None):
    def body(rank):
        paceline.init()
        torch.manual_seed(1)
        made = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        model = torch.nn.Sequential(*made)
        plain = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.distribute(model, plain, method=method)
        for _ in range(steps):
            if before is not None:
                before(rank)
            model(torch.full((2, width), 1.0 + rank)).sum().backward()
            optimizer.step()

    return body


def test_links_are_measured_both_ways_and_again_and_again():
    slow = throttle("worker 2 out", LINK / 5, at=0.0)
    evidence = examine_simulated_network(Cluster((rack(3),), rules=(slow,)), 0.05)
    assert {(p.source, p.target) for p in evidence.paths} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    for path in evidence.paths:
        assert len(path.rates) == 5
        expected = LINK / 5 if path.source == 2 else LINK
        assert path.rates == pytest.approx([expected] * 5, rel=0.02)
        assert path.latency == pytest.approx(1e-4, rel=0.02)
        assert path.retransmitted is None


def test_contention_that_changes_shows_in_the_repeats():
    rules = tuple(
        throttle("worker 1", LINK / (4 if turn % 2 else 1), at=0.3 * turn)
        for turn in range(40)
    )
    evidence = examine_simulated_network(Cluster((rack(3),), rules=rules), 0.05)
    touched = [p for p in evidence.paths if 1 in (p.source, p.target)]
    assert max(max(p.rates) / min(p.rates) for p in touched) > 2
    others = [p for p in evidence.paths if p not in touched]
    assert all(max(p.rates) / min(p.rates) < 1.05 for p in others)


def test_a_scarce_uplink_shows_where_all_send_at_once_though_each_pair_is_fast():
    racks = tuple(rack(2, uplink=1.5 * LINK) for _ in range(2))
    evidence = examine_simulated_network(Cluster(racks), 0.05)
    assert all(min(p.rates) > 0.95 * LINK for p in evidence.paths)
    assert len(evidence.concurrent) == 3
    for one in evidence.concurrent:
        crossing = [
            rate
            for source, target, rate in zip(
                one.sources, one.targets, one.rates, strict=True
            )
            if (source < 2) != (target < 2)
        ]
        share = 0.75 if len(crossing) == 4 else 1.0
        assert crossing == pytest.approx([share * LINK] * len(crossing), rel=0.05)
        assert max(one.rates) < 1.05 * LINK


def test_where_a_step_goes():
    evidence = examine(Cluster((rack(4),)), trains(), forward=0.1, backward=0.2)
    assert evidence.spec == "bsp:buckets=wfbp"
    assert len(evidence.workers) == 4
    for worker in evidence.workers:
        step = worker.step
        assert step.steps == 7  # of eight; the first has no beginning
        assert step.steady
        assert step.passes == 1
        assert step.forward.median == pytest.approx(0.1)
        assert step.backward.median == pytest.approx(0.2)
        assert step.input.median == step.update.median == 0
        assert step.first_wait.median == pytest.approx(0.3)
        parts = 0.3 + step.exposed.median
        assert step.step.median == pytest.approx(parts)
        assert step.messages == 4
        assert step.bytes_sent == 4 * 64 * 64 * 4 * 2 * 3 / 4
        assert step.at_end == pytest.approx(0.25)
        assert step.step.spread == pytest.approx(0, abs=1e-12)
    assert evidence.workload.forward_seconds == pytest.approx(0.1)
    assert evidence.workload.backward_seconds == pytest.approx(0.2)


PARTS = ("input", "forward", "backward", "update", "exposed")


@pytest.mark.parametrize(
    "spec",
    [
        "asp",
        "dear",
        "local-sgd:sync_every=3",
        "bsp:compression=int8",
        "bsp:collective=parameter-server",
    ],
)
def test_parts_make_up_the_step_wherever_a_method_waits(spec):
    cluster = Cluster((rack(3, speed=(1.0, 0.7, 1.0)),))
    simulation = Simulation(cluster, compute=ComputeModel(forward=0.02, backward=0.04))
    watches = []

    def watcher(runtime):
        def begins(model, parameters):
            watches.append(StepWatch(runtime, model, parameters))
            return watches[-1:]

        return begins

    for rank in range(3):
        runtime = simulation.runtime_of(rank)
        runtime.registry.watchers.append(watcher(runtime))
    simulation.run(trains(steps=9, method=spec))
    for watch in watches:
        found = watch.phases()
        parts = sum(getattr(found, name).median for name in PARTS)
        # Of a method's rounds these are means, which add up; waits differ from round to round.
        assert parts == pytest.approx(found.step.median, rel=0.05)
        assert found.forward.median > 0
    (count,) = {watch.phases().steps for watch in watches}
    assert count >= 6


def test_a_slow_host_is_slow_before_its_first_wait_and_nowhere_in_the_step():
    cluster = Cluster((rack(3, speed=(1.0, 0.5, 1.0)),))
    evidence = examine(cluster, trains(), forward=0.1, backward=0.2)
    waits = [worker.step.first_wait.median for worker in evidence.workers]
    assert waits == pytest.approx([0.3, 0.6, 0.3])
    whole = [worker.step.step.median for worker in evidence.workers]
    assert whole == pytest.approx([whole[0]] * 3)
    assert [worker.speed for worker in evidence.workers] == [1.0, 0.5, 1.0]


def test_input_that_starves():
    def load(rank):
        paceline.pace(0.25 if rank == 1 else 0.01)

    evidence = examine(Cluster((rack(2),)), trains(before=load))
    inputs = [worker.step.input.median for worker in evidence.workers]
    assert inputs == pytest.approx([0.01, 0.25])


def test_accumulated_passes_are_one_step():
    def body(rank):
        paceline.init()
        model = torch.nn.Linear(64, 64)
        plain = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.distribute(model, plain, method="bsp:buckets=ddp")
        batch = torch.full((2, 64), 1.0 + rank)
        for _ in range(6):
            with optimizer.no_sync():
                model(batch).sum().backward()
            model(batch).sum().backward()
            optimizer.step()

    evidence = examine(Cluster((rack(2),)), body, forward=0.1, backward=0.2)
    step = evidence.workers[0].step
    assert step.passes == 2
    assert step.forward.median == pytest.approx(0.2)
    assert step.backward.median == pytest.approx(0.4)


def test_gradients_that_come_all_at_the_end():
    def body(rank):
        paceline.init()
        model = paceline.stand_in(
            paceline.Workload(
                names=("a", "b", "c"),
                sizes=(4000, 4000, 8000),
                forward=(0.1, 0.1, 0.1),
                backward=(0.0, 0.0, 0.6),
            )
        )
        plain = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.distribute(model, plain, method="bsp:buckets=ddp")
        for _ in range(6):
            model(torch.full((1,), 1.0 + rank)).backward()
            optimizer.step()

    evidence = examine(Cluster((rack(2),)), body)
    assert evidence.workers[0].step.at_end == 1


def test_a_part_of_the_model_that_is_called_by_itself():
    def body(rank):
        paceline.init()
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        plain = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.distribute(model, plain, method="bsp:buckets=ddp")
        for _ in range(6):
            batch = torch.full((2, 64), 1.0 + rank)
            model[1](model[0](batch)).sum().backward()
            optimizer.step()

    step = examine(Cluster((rack(2),)), body, backward=0.2).workers[0].step
    assert step.steps == 5
    assert step.input.median == 0
    assert step.forward.median + step.backward.median > 0


def test_a_script_that_trains_nothing_has_its_network_measured():
    evidence = examine(Cluster((rack(2),)), lambda rank: paceline.init())
    assert evidence.workers[0].step is None
    assert evidence.workload is None
    assert len(evidence.paths) == 2


def test_nobody_makes_room_for_more_than_can_be_meant(monkeypatch):
    monkeypatch.setattr(broadcast, "MOST_GATHERED", 9)
    refused = []

    def body(rank):
        paceline.init()
        told = broadcast.gather_bytes(b"x" * (8 + rank), torch.device("cpu"))
        assert [len(text) for text in told] == [8, 9]
        with pytest.raises(UsageError, match="rank 1 sends 10 bytes") as caught:
            broadcast.gather_bytes(b"x" * (9 + rank), torch.device("cpu"))
        refused.append(caught.value)

    Simulation(Cluster((rack(2),))).run(body)
    assert len(refused) == 2
