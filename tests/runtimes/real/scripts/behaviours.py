"""What plain training scripts rely on, checked by the script itself on every rank."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import paceline

paceline.init()
RANK, SIZE = paceline.rank(), paceline.world_size()


class Branches(nn.Module):
    """Three layers, of which each forward pass uses some."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x, both):
        x = self.shared(x)
        return self.sometimes(x) if both else x


def check_unused(buckets):
    torch.manual_seed(0)
    model, alone = Branches(), Branches()
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9
    )
    optimizer = paceline.distribute(model, optimizer, buckets=buckets)
    before = model.never.weight.clone()
    for step in range(4):
        user = step % SIZE  # only this rank uses the branch
        inputs = [torch.full((2, 4), 1.0 + step + rank) for rank in range(SIZE)]
        optimizer.zero_grad()
        model(inputs[RANK], both=user == RANK).sum().backward()

        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        for rank, x in enumerate(inputs):
            (alone(x, both=rank == user).sum() / SIZE).backward()
        for name, parameter in alone.named_parameters():
            ours = model.get_parameter(name).grad
            if name.startswith("never"):
                assert ours is None, (step, name)
            else:
                torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
    optimizer.finish()
    assert torch.equal(model.never.weight, before), "decay moved an unused parameter"
    check_equal_everywhere(model)


def check_uneven(way, lengths, buckets):
    """Ranks have *lengths* batches; each mean is over those that still have one."""
    torch.manual_seed(1)
    model, alone = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = paceline.distribute(model, optimizer, buckets=buckets)
    alone.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)

    def batch(rank, step):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return torch.randn(5, 4, generator=generator)

    def train():
        for step in range(lengths[RANK]):
            optimizer.zero_grad()
            model(batch(RANK, step)).square().mean().backward()
            optimizer.step()

    if way == "finish":
        train()
        optimizer.finish()
        optimizer.finish()  # again is harmless
    else:
        with optimizer.join():
            train()

    # Afterwards every rank holds the model of those that trained to the end.
    for step in range(max(lengths)):
        reference.zero_grad()
        here = [rank for rank in range(SIZE) if step < lengths[rank]]
        for rank in here:
            (alone(batch(rank, step)).square().mean() / len(here)).backward()
        reference.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    check_equal_everywhere(model)


def check_equal_everywhere(model):
    for tensor in model.state_dict().values():
        largest, smallest = tensor.detach().clone(), tensor.detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        assert torch.equal(largest, smallest)


for buckets in ("ddp", "wfbp"):
    check_unused(buckets)
LENGTHS = [3 + 2 * rank for rank in range(SIZE)]
for way in ("finish", "join"):
    check_uneven(way, LENGTHS, "ddp")
    check_uneven(way, LENGTHS[::-1], "wfbp")
    check_uneven(way, [0] + LENGTHS[1:], "single")
sys.stdout.write(f"checked {RANK} of {SIZE}\n")
