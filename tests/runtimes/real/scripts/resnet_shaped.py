"""Train a small ResNet with everything at once, with paceline or with DDP: BatchNorm,
accumulation, clipping, a scheduler, autocast, uneven data.

torchrun --nproc-per-node 2 resnet_shaped.py FOLDER paceline ddp
"""

import contextlib
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join

import paceline

STEPS = 20
"""Optimizer steps for which all ranks have data."""
MORE_STEPS = {2: (1, 4), 4: (2, 4, 2, 6)}
"""For how many more each rank has, by the number of ranks: 4 train, then 2, then 1."""
PASSES = 2
BATCH = 8
LARGEST_NORM = 0.5
FINEST = 2.0**-20
"""Gradients are multiples of this: float32 sums them without an error, and halves the sum."""


class Block(nn.Module):
    """Two convolutions beside a shortcut, which downsamples where they do."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False),
                nn.BatchNorm2d(outside),
            )

    def forward(self, x):
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet():
    """Of 390 thousand parameters: more than DDP's first bucket."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Block(24, 24, 1),
        Block(24, 48, 2),
        Block(48, 48, 1),
        Block(48, 96, 2),
        Block(96, 96, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def one_cycle(optimizer, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1)


def warm_up(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (1 - step / (2 * steps))
    )


CASES = {"sgd": (sgd, one_cycle), "adamw": (adamw, warm_up)}


def batches(rank):
    """Images of ten classes, each a pattern under noise."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(99))
    data = torch.Generator().manual_seed(100 + rank)
    while True:
        labels = torch.randint(10, (BATCH,), generator=data)
        noise = torch.randn(BATCH, 3, 16, 16, generator=data)
        yield patterns[labels] + noise, labels


def train(engine, make_optimizer, make_scheduler, save):
    """Train an even epoch, then an uneven one; ``save(moment, model)`` after each.

    The first is outside `Join`: within it DDP takes buffers from the highest rank that
    still trains, not from rank 0.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # Each rank builds another model: training starts from rank 0's.
    torch.manual_seed(rank)
    model = resnet()
    # The engines add up in different orders. A last digit that differs can move a parameter over
    # the border between two bfloat16 numbers, so nothing may be rounded.
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: (gradient / FINEST).round() * FINEST)
    optimizer = make_optimizer(model)
    if engine == "paceline":
        network = model
        optimizer = paceline.distribute(model, optimizer)
        unsynchronized, join = optimizer.no_sync, optimizer.join
    else:
        network = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True
        )
        unsynchronized = network.no_sync
        join = partial(Join, [network], divide_by_initial_world_size=False)
    scheduler = make_scheduler(optimizer, STEPS + max(MORE_STEPS[size]))
    data = batches(rank)

    def take_steps(number):
        for _ in range(number):
            optimizer.zero_grad()
            for accumulated in range(1, PASSES + 1):
                images, labels = next(data)
                last = accumulated == PASSES
                with contextlib.nullcontext() if last else unsynchronized():
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = F.cross_entropy(network(images), labels)
                    (loss / PASSES).backward()
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            scheduler.step()

    take_steps(STEPS)
    save("even", model)
    with join():
        take_steps(MORE_STEPS[size][rank])
    save("end", model)


def main():
    folder, *engines = sys.argv[1:]
    dist.init_process_group("gloo")
    for engine in engines:
        for name, case in CASES.items():

            def save(moment, model, start=f"{engine}-{name}"):
                path = Path(folder) / f"{start}-{moment}-{dist.get_rank()}.pt"
                torch.save(model.state_dict(), path)

            train(engine, *case, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
