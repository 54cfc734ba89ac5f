"""What has few elements, and stands for many, is moved at the price of the many."""

import pytest
import torch

from paceline.collectives.communicator import Communicator, ConnectionlessGroup
from paceline.collectives.registry import COLLECTIVES, attach, make
from paceline.interfaces.buckets import stand_in_for
from paceline.runtimes.join import join_runtime
from tests.support.simulations import cluster, rack, run

WORKERS = 6
SIZE = 720_720
"""Bytes; of so many elements parts are whole, however they are cut."""


def all_reduce(comm, tensor):
    return comm.all_reduce(tensor(SIZE))


def broadcast(comm, tensor):
    return comm.broadcast(tensor(SIZE))


def reduce_scatter(comm, tensor):
    return comm.reduce_scatter(tensor(SIZE // WORKERS), tensor(SIZE))


def all_gather(comm, tensor):
    return comm.all_gather(tensor(SIZE), tensor(SIZE // WORKERS))


def all_to_all(comm, tensor):
    return comm.all_to_all(tensor(SIZE), tensor(SIZE))


OPERATIONS = [all_reduce, broadcast, reduce_scatter, all_gather, all_to_all]


def seconds(make_comm, operation, elements):
    """Of an operation on `SIZE` bytes in so many elements."""

    def tensor(size):
        return stand_in_for(size, torch.zeros(max(1, elements * size // SIZE)))

    def body(rank):
        runtime = join_runtime()
        comm = make_comm(runtime, Communicator(runtime))
        start = runtime.clock.now()
        operation(comm, tensor).wait()
        return runtime.clock.now() - start

    return max(run(cluster(rack(4), rack(2, uplink=8e6)), body))


@pytest.mark.parametrize("name", sorted(COLLECTIVES.keys() - {"parameter-server"}))
def test_a_collective_s_price_is_of_the_bytes(name):
    def of(elements):
        return seconds(
            lambda runtime, comm: attach(make(name), runtime, comm),
            all_reduce,
            elements,
        )

    assert of(2) == of(100) == of(SIZE // 4)


def own_group(_, comm):
    return comm.group(range(WORKERS))


def sends(_, comm):
    return ConnectionlessGroup(comm, range(WORKERS), "sends")


@pytest.mark.parametrize("make_comm", [own_group, sends])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_price_of_each_operation_is_of_the_bytes(operation, make_comm):
    def of(elements):
        return seconds(make_comm, operation, elements)

    assert of(WORKERS) == of(100 * WORKERS) == of(SIZE // 4)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_a_message_is_sent_at_the_price_of_the_bytes(shape):
    def of(tensor):
        def body(rank):
            runtime = join_runtime()
            comm, start = Communicator(runtime), runtime.clock.now()
            (comm.receive if rank else comm.send)(tensor, 1 - rank).wait()
            return runtime.clock.now() - start

        return max(run(2, body))

    assert of(stand_in_for(SIZE, torch.zeros(shape))) == of(torch.zeros(SIZE // 4))
