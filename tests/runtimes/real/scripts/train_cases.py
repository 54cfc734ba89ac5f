"""Train every case for 20 steps, with paceline or with DDP; leave what came out.

torchrun --nproc-per-node 2 train_cases.py FOLDER paceline ddp
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline

STEPS = 20


def perceptron():
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8), nn.Linear(8, 5)
    )


def wide():
    """More than DDP's first bucket of 1 MiB, so that there are several."""
    return nn.Sequential(
        nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 700), nn.Linear(700, 5)
    )


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.features(x.view(-1, 1, 3, 4))))
        return self.head(self.frozen(x.mean((2, 3))))


class ChannelsLast(nn.Module):
    """Gradients whose elements lie in another order than those of a contiguous tensor."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv2d(3, 6, (2, 3))
        self.features = conv.to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(6, 7, 1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 5).t())

    def forward(self, x):
        image = x.view(-1, 3, 2, 2).repeat(1, 1, 2, 2)
        seen = self.point(F.relu(self.features(image)))
        return F.linear(seen.mean((2, 3)), self.turned)


class Experts(nn.Module):
    """In each pass some tensors are unused: others on each rank, and some on all."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(12, 9)
        self.experts = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        self.head = nn.Linear(9, 5)
        self.calls = 0

    def forward(self, x):
        expert = self.experts[(dist.get_rank() + self.calls) % 3 + (self.calls > 15)]
        self.calls += 1
        return self.head(expert(self.inputs(x).tanh()).tanh())


class Tied(nn.Module):
    """The same matrix at the entry and at the end."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(12, 5, bias=False)
        self.outputs = nn.Linear(5, 12, bias=False)
        self.outputs.weight = nn.Parameter(self.inputs.weight.detach().t().clone())
        self.again = nn.Linear(12, 5, bias=False)
        self.again.weight = self.inputs.weight

    def forward(self, x):
        return self.again(self.outputs(self.inputs(x).tanh()))


class Checkpointed(nn.Module):
    """Its middle is computed once more in backward."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(12, 32)
        self.middle = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        inside = self.inputs(x).tanh()
        return self.head(checkpoint(self.middle, inside, use_reentrant=False))


def compiled_blocks():
    """Blocks that torch.compile has traced; no code is generated."""
    model = perceptron()
    for block in model:
        block.compile(backend="aot_eager")
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def fused_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def foreach_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def grouped(model):
    head = list(model.head.parameters())
    rest = [*model.features.parameters(), *model.norm.parameters()]
    groups = [{"params": rest}, {"params": head, "lr": 0.2, "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


# name: model, optimizer, bucket rule, backward passes a step
CASES = {
    "sgd-ddp": (wide, sgd, "ddp", 1),
    "sgd-single": (perceptron, sgd, "single", 1),
    "sgd-wfbp": (perceptron, sgd, "wfbp", 1),
    "adamw-ddp": (wide, adamw, "ddp", 1),
    "adamw-single": (perceptron, adamw, "single", 1),
    "adamw-wfbp": (perceptron, adamw, "wfbp", 1),
    "batchnorm": (Convolutional, sgd, "ddp", 1),
    "sgd-fused-strides": (ChannelsLast, fused_sgd, "ddp", 1),
    "adamw-fused-strides": (ChannelsLast, fused_adamw, "single", 1),
    "adamw-foreach-strides": (ChannelsLast, foreach_adamw, "wfbp", 3),
    "sgd-unused": (Experts, sgd, "wfbp", 1),
    "sgd-unused-accumulated": (Experts, sgd, "wfbp", 3),
    "sgd-tied": (Tied, sgd, "wfbp", 1),
    "sgd-checkpointed": (Checkpointed, sgd, "wfbp", 1),
    "adamw-compiled-blocks": (compiled_blocks, adamw, "wfbp", 1),
    "everything": (Convolutional, grouped, "wfbp", 3),
}


def train(engine, make_model, make_optimizer, buckets, passes):
    rank = dist.get_rank()
    # Each rank builds another model: training starts from rank 0's.
    torch.manual_seed(rank)
    model = make_model()
    optimizer = make_optimizer(model)
    if engine == "paceline":
        network = model
        optimizer = paceline.distribute(model, optimizer, buckets=buckets)
        unsynchronized = optimizer.no_sync
    else:
        network = nn.parallel.DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            find_unused_parameters=isinstance(model, Experts),
        )
        unsynchronized = network.no_sync
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=passes == 1)
        for number in range(passes):
            last = number == passes - 1
            with contextlib.nullcontext() if last else unsynchronized():
                x = torch.randn(6, 12, generator=data)
                y = torch.randint(5, (6,), generator=data)
                F.cross_entropy(network(x), y).backward()
        optimizer.step()
        scheduler.step()
    # Under DDP the first forward pass after training shares the buffers, on all ranks
    # together; with paceline they are there, and any rank may evaluate alone.
    network.eval()
    evaluated = {}
    if engine == "ddp" or rank > 0:
        with torch.no_grad():
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(9))
            evaluated["evaluated"] = network(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if engine == "paceline":
        optimizer.finish()
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name])
    return state | evaluated


def main():
    folder, *engines = sys.argv[1:]
    dist.init_process_group("gloo")
    for engine in engines:
        for name, case in CASES.items():
            result = train(engine, *case)
            path = Path(folder) / f"{engine}-{name}-{dist.get_rank()}.pt"
            torch.save(result, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
