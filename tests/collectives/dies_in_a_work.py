"""Rank 2 of three dies in a work, where the others have issued a second round."""

import os

import torch

import paceline
from paceline.collectives.communicator import Communicator
from paceline.runtimes.join import join_runtime

paceline.init()
comm = Communicator(join_runtime(), "dying")
buffer = torch.ones(1000)


def second():
    if paceline.rank() == 2:
        os._exit(3)
    return comm.all_reduce(buffer, "sum")


comm.all_reduce(buffer, "sum").then(lambda: comm.all_reduce(buffer, "sum")).wait()
pending = comm.all_reduce(buffer, "sum").then(second)
if paceline.rank() != 2:
    pending.wait()
else:
    comm.broadcast(buffer, 0).wait()  # which nobody else comes to
