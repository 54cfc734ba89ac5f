"""Plans on real processes: one model and equal buckets on all ranks, also where data ends
in the middle of planning. Times differ from run to run, and so do plans."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.bucketing import tuner
from paceline.testing import inspect

tuner.watch.every, tuner.watch.steps = 6, 3
STEPS = 40
ENDS = [int(word) for word in sys.argv[1:]]


def same_everywhere(values):
    own = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(2 * own.numel(), dtype=torch.float64)
    dist.all_gather_single(everyone, own)
    return bool((everyone.view(2, -1) == own).all())


def model_of():
    torch.manual_seed(3)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, 64, dtype=torch.float64))


def loss_of(model, step):
    generator = torch.Generator().manual_seed(1000 * paceline.rank() + step)
    x = model[:-1](torch.randn(4, 64, generator=generator))
    return model[-1](x.double()).square().mean()


class Whole(nn.Module):
    """Called as one model: both dtypes within one forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = model_of()

    def forward(self, step):
        return loss_of(self.inner, step)


def train(steps, buckets):
    model = Whole()
    optimizer = paceline.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        buckets=buckets,
    )
    groups = []
    with optimizer.join():
        for step in range(steps):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
            buckets = inspect(optimizer).buckets
            place = {n: b.index for b in buckets for n in b.names}
            groups.append([place[name] for name, _ in model.named_parameters()])
    return model, groups


def flat(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


paceline.init()
fixed, _ = train(STEPS, "wfbp")
for rule in ("optimal", "mg-wfbp"):
    model, groups = train(STEPS, rule)
    assert same_everywhere(flat(model).tolist())
    assert same_everywhere([g for step in groups for g in step])
    # of two ranks sums are equal in any pieces
    assert torch.equal(flat(model), flat(fixed))
for number, end in enumerate(ENDS):
    mine = end if number % 2 == paceline.rank() else STEPS
    model, groups = train(mine, "optimal")
    assert same_everywhere(flat(model).tolist()), end
    common = [g for step in groups[:end] for g in step]
    assert same_everywhere(common), end
sys.stdout.write(f"checked {paceline.rank()}\n")  # in one piece
