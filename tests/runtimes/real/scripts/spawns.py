"""Starts its workers itself, as a script does that needs no launcher."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import paceline


def main(rank, size):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29512")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = torch.nn.Linear(2, 1)
    paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
