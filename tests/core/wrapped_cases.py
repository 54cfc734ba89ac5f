"""Run as a process of its own, a job of one: models that another tool makes parallel too.

Each case raises where it fails; the last line printed says that all were tried.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def given(model):
    return paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(network):
    network(torch.ones(2, 3)).square().mean().backward()


def refused(match):
    return pytest.raises(UsageError, match=match)


def ddp_around():
    """Wrapped after distribute or before it; around the model, or around its owner."""
    for before in (False, True):
        for owner in (lambda model: model, Around):
            model = Net()
            wrapped = DistributedDataParallel(owner(model)) if before else None
            optimizer = given(model)
            wrapped = wrapped or DistributedDataParallel(owner(model))
            with torch.no_grad():
                wrapped(torch.ones(2, 3))  # an evaluation averages nothing
            with refused("runs inside DistributedDataParallel"):
                train(wrapped)
            optimizer.finish()


def fsdp(module):
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=True
    )


def a_part_is_under_another_tool():
    mesh = init_device_mesh("cpu", (1,))
    tools = {
        "DistributedDataParallel": DistributedDataParallel,
        "replicate": replicate,
        "fully_shard": lambda module: fully_shard(module, mesh=mesh),
        "FSDP": fsdp,
    }
    for name, tool in tools.items():
        model = Net()
        model.body = tool(model.body)
        with refused(f"its part 'body.*' is under {name}"):
            given(model)
        late = Net()
        optimizer = given(late)
        late.body = tool(late.body)
        with refused(f"its part 'body.*' is under {name}"):
            train(late)
        optimizer.finish()


def the_whole_is_under_another_tool():
    mesh = init_device_mesh("cpu", (1,))
    for name, tool in {
        "replicate": replicate,
        "fully_shard": lambda module: fully_shard(module, mesh=mesh),
        "FSDP": fsdp,
    }.items():
        with refused(f"it is under {name}"):
            given(tool(Net()))
        late = Net()
        optimizer = given(late)
        tool(late)
        with refused(f"it is under {name}|runs inside"):
            train(late)
        optimizer.finish()


def fsdp_around():
    """What it is around is sharded too."""
    inner = Net()
    fsdp(Around(inner))
    with refused("sharded: it is under FSDP"):
        given(inner)


def distributed_tensors():
    mesh = init_device_mesh("cpu", (1,))
    with refused(r"'body\.weight' is a DTensor"):
        given(distribute_module(Net(), mesh))
    late = Net()
    optimizer = given(late)
    distribute_module(late, mesh)
    with refused("is a DTensor"):
        train(late)
    optimizer.finish()


def another_model_under_ddp_is_nobodys_business():
    model, teacher = Net(), DistributedDataParallel(Net())
    alone = copy.deepcopy(model)
    optimizer = given(model)
    x = torch.ones(2, 3)
    (model(x) - teacher(x)).square().mean().backward()
    (alone(x) - teacher(x)).square().mean().backward()
    assert torch.equal(model.body.weight.grad, alone.body.weight.grad)
    optimizer.step()
    optimizer.finish()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ddp_around()
    a_part_is_under_another_tool()
    the_whole_is_under_another_tool()
    fsdp_around()
    distributed_tensors()
    another_model_under_ddp_is_nobodys_business()
    print("all tried")
    dist.destroy_process_group()
