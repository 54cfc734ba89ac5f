"""Sums of groups, of channels and of works, all at two aggregators: each a queue of its own."""

import torch

import paceline
from paceline.collectives.communicator import Communicator, ConnectionlessGroup
from paceline.collectives.registry import attach, make
from paceline.runtimes.join import join_runtime

paceline.init()
runtime = join_runtime()
comm = attach(make("rina"), runtime, Communicator(runtime))
rank = comm.rank
mine = [0, 1] if rank < 2 else [2, 3]
rack, pair = comm.group(mine), comm.group(sorted((rank, rank ^ 2)))


def ones(value, size=5000):
    return torch.full((size,), float(value))


for _ in range(3):
    everybody, own, across, beside = ones(1 + rank), ones(rank), ones(rank), ones(2)
    first = comm.all_reduce(everybody, "sum")
    second = first.then(lambda it=everybody: comm.all_reduce(it, "sum"))
    rack.all_reduce(own, "sum").wait()
    pair.all_reduce(across, "mean").wait()
    comm.channel("beside").all_reduce(beside, "sum").wait()
    second.wait()
    near = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(everybody, ones(40), **near)
    torch.testing.assert_close(own, ones(sum(mine)), **near)
    torch.testing.assert_close(across, ones((rank + (rank ^ 2)) / 2), **near)
    torch.testing.assert_close(beside, ones(8), **near)
sends = ConnectionlessGroup(comm, mine, f"{comm.name}, sends")
sent = ones(rank)
sends.all_reduce(sent, "sum").wait()
torch.testing.assert_close(sent, ones(sum(mine)))
comm.close()
print("all as they should be")
