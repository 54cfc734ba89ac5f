"""Rank 1's script catches the error that has put it out of step, and ends well."""

import sys

import torch

import paceline

paceline.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = paceline.distribute(model, optimizer, method=sys.argv[1], buckets="wfbp")


def fail(_):
    raise ValueError("in the middle of a backward pass")


def fail_once(module, arguments, output):
    if chosen:
        output.register_hook(fail)


model[0].register_forward_hook(fail_once)
try:
    for step in range(optimizer.first_step, 40):
        chosen = paceline.rank() == 1 and step == 5
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.finish()
except ValueError:
    print(f"rank {paceline.rank()} goes on without", flush=True)
else:
    print(f"rank {paceline.rank()} trained", flush=True)
