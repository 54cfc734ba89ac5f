# One training after the other, beside one that goes on from the first to the last; says what
# the process holds after five of them, and after all.
import json
import os
import sys

import torch

import paceline

METHODS = (
    "bsp:collective=ring",
    "bsp:compression=int8",
    "ds-sync:overlap=step",
    "streaming-diloco:sync_every=4,fragments=2,delay=1",
    "daso:sync_every=2,delay=1,group=2",
)


def begin(method):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, paceline.distribute(model, sgd, method=method, buckets="wfbp")


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + paceline.rank())).square().sum().backward()
    optimizer.step()


def states(optimizers):
    return [
        [
            state["momentum_buffer"].tolist()
            for state in o.state_dict()["state"].values()
        ]
        for o in optimizers
    ]


def held():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


paceline.init()
beside = [begin("ds-sync") for _ in range(int(sys.argv[1]))]
ended, before, holds = [], [], []
for number in range(20):
    model, optimizer = begin(METHODS[number % len(METHODS)])
    for _ in range(5):
        step(model, optimizer)
        for one in beside:
            step(*one)
    optimizer.finish()
    ended.append(optimizer)
    before += states([optimizer])
    if number in (4, 19):
        holds.append(held())
assert states(ended) == before, "what has ended has changed"
for optimizer in ended:
    with optimizer.consolidated():
        optimizer.finish()
paceline.save(sys.argv[2])  # holds them all
for _, optimizer in beside:
    optimizer.finish()
print(json.dumps(holds))
