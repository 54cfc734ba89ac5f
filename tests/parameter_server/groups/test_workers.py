"""Servers that hold all of the model each, from a worker's side: here they pass nothing on, so
that what lies where can be told apart."""

from dataclasses import replace

import pytest
import torch

import paceline
from paceline.cluster import ServerHost
from paceline.errors import WorkerFailedError
from paceline.methods import METHODS
from paceline.parameter_server.process import services
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing import inspect
from paceline.testing.problems import Counting, flat_parameters
from tests.support.group_server_trial import Grouped
from tests.support.simulations import cluster, rack, simulation

LR = 0.5
WORKERS = 4
TWO = "grouped:members=0-1+2-3"


def _by_itself(description, workers, method):
    def make(_):
        discipline = method.server(workers)
        discipline.serve_group(description.number)
        return discipline

    return ParameterServer(workers, make, description.name)


@pytest.fixture(autouse=True)
def servers_by_themselves(monkeypatch):
    monkeypatch.setitem(METHODS, Grouped.name, Grouped)
    monkeypatch.setitem(services.SERVICES, "group-server", _by_itself)


def train(
    method, steps=3, after=lambda *_: None, momentum=0.0, runtime=None, **options
):
    """What each worker's *model* and *optimizer* end as."""
    runtime, ends = runtime or simulation(WORKERS), {}

    def body(rank):
        model = Counting()
        plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        optimizer = paceline.distribute(model, plain, method=method, **options)
        for step in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            after(rank, step, model, optimizer)
        optimizer.finish()
        ends[rank] = flat_parameters(model), optimizer.state_dict()["state"]

    runtime.run(body)
    return [ends[rank] for rank in range(WORKERS)], runtime


def machines(runtime):
    return [service.server for service in runtime._services[0]]


def start():
    return flat_parameters(Counting())


def moved(end):
    """How many whole gradients, each at a weight of 1, have moved parameters."""
    counts = (start() - end[0]) / LR
    assert counts.max() - counts.min() < 1e-3
    return round(counts.mean().item(), 3)


def test_gradients_go_to_the_group_s_server_alone():
    ends, runtime = train("grouped:members=0-2+3")
    assert [moved(end) for end in ends] == [3 * 3 / 4] * 3 + [3 * 1 / 4]
    counts = [machine.counts["gradients applied"] for machine in machines(runtime)]
    buckets = len(machines(runtime)[0].shard.buckets)
    assert counts == [9 * buckets, 3 * buckets]
    # Each holds all of the model.
    sizes = [sum(f.numel() for f in m.shard.store.flats) for m in machines(runtime)]
    assert sizes == [start().numel()] * 2


def test_states_come_from_the_group_s_server():
    ends, _ = train("grouped:members=0-2+3", momentum=0.9)
    momenta = [
        torch.cat([s["momentum_buffer"].reshape(-1) for s in state.values()])
        for _, state in ends
    ]
    assert torch.equal(momenta[0], momenta[2])
    assert not torch.equal(momenta[0], momenta[3])


def test_who_looks_sees_the_group_s_server_s():
    seen = {}

    def look(rank, step, model, optimizer):
        if step == 2:
            inspect(optimizer).remote.barrier()
            with optimizer.consolidated():
                seen[rank] = flat_parameters(model)

    train("grouped:members=0-2+3", after=look)
    assert moved([seen[0]]) == moved([seen[2]]) == 3 * 3 / 4
    assert moved([seen[3]]) == 3 * 1 / 4


@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "int8", "replies": "deltas"}],
    ids=["full", "deltas"],
)
def test_a_worker_that_moves_holds_what_its_new_server_has(options):
    runtime = simulation(WORKERS)

    def move(rank, step, model, optimizer):
        remote = inspect(optimizer).remote
        remote.barrier()
        if rank == 3 and step == 1:
            assert remote.group == 1
            remote.move(0, step + 1)
            assert remote.group == 0
            assert moved([flat_parameters(model)]) == 2 * 2 / 4
            for server, copies in enumerate(
                machine.shard.compression for machine in machines(runtime)
            ):
                if options:  # the other one has let go of its copies
                    held = [key for key in copies.replicas if key[0] == 3]
                    assert bool(held) == (server == 0)
        remote.barrier()

    ends, _ = train(TWO, 4, move, runtime=runtime, **options)
    # Server 0 has 4 gradients of workers 0 and 1, and 2 of worker 3; the other one the rest.
    assert [moved(end) for end in ends] == [(8 + 2) / 4] * 2 + [(4 + 2) / 4, 10 / 4]
    assert machines(runtime)[0].shard.members.clock(3) == 4


def test_a_worker_may_move_there_and_back():
    def move(rank, step, model, optimizer):
        if rank == 3:
            inspect(optimizer).remote.move(step % 2, step + 1)

    ends, runtime = train(TWO, 5, move, compression="int8", replies="deltas")
    assert sum(m.counts["gradients applied"] for m in machines(runtime)) == 20 * len(
        machines(runtime)[0].shard.buckets
    )
    assert moved(ends[0]) == (2 * 5 + 2) / 4


def test_a_step_that_a_server_had_not_heard_of_may_be_an_earlier_one():
    """It has let a worker in at the step of its own group, which was further."""

    def move(rank, step, model, optimizer):
        remote = inspect(optimizer).remote
        remote.barrier()
        if rank == 0 and step == 1:
            machines(runtime)[0].shard.members[3].begins_with(50)
        remote.barrier()
        if rank == 3 and step == 1:
            remote.move(0, 2)

    runtime = simulation(WORKERS)
    train(TWO, 4, move, runtime=runtime)
    assert machines(runtime)[0].shard.members.clock(3) == 4


def test_groups_that_there_are_not_are_refused():
    def move(rank, step, model, optimizer):
        inspect(optimizer).remote.move(2, step + 1)

    with pytest.raises(WorkerFailedError, match=r"group 2: expected .* 0 to 1"):
        train(TWO, 1, move)
    with pytest.raises(WorkerFailedError, match="each group"):
        train("asp", 1, move)


def test_groups_of_the_cluster_file_are_the_method_s_unless_it_has_others():
    by_hand = cluster(rack(3, group="a"), rack(1, group="b"))
    runtime = simulation(by_hand)
    ends, _ = train("grouped", runtime=runtime)
    assert [moved(end) for end in ends] == [3 * 3 / 4] * 3 + [3 * 1 / 4]
    # Servers elsewhere know of it from the spec that workers join with.
    first = machines(runtime)[0]._first_join
    assert "members=0-2+3" in first.method
    ends, _ = train(TWO, runtime=simulation(by_hand))
    assert [moved(end) for end in ends] == [3 * 2 / 4] * 4
    ends, _ = train("asp", runtime=simulation(by_hand))
    assert [moved(end) for end in ends] == [3 * 4 / 4] * 4


def test_dedicated_hosts_and_named_places_have_a_server_each():
    for hosts, place in ((2, "auto"), (3, "dedicated"), (0, "per-node"), (1, "auto")):
        runtime = simulation(
            replace(cluster(rack(WORKERS)), servers=(ServerHost(),) * hosts)
        )
        train("grouped:members=0.3+1-2", runtime=runtime, servers=place)
        found = [service.host for service in runtime._services[0]]
        own = runtime.cluster.host_of_server
        expected = [own(0), own(1)] if hosts > 1 else [0, 1]
        assert found == expected, (hosts, place)
    one = replace(cluster(rack(WORKERS)), servers=(ServerHost(),))
    with pytest.raises(WorkerFailedError, match=r"has 2 servers, .* for 1: start"):
        train(TWO, runtime=simulation(one), servers="dedicated")
