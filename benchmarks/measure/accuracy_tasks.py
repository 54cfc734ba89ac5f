"""Tasks of the benchmarks of accuracy: `DIGITS` and `BYTES`, which each of them may vary."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import bytes_lm
import digits


@dataclass(frozen=True)
class Task:
    """*evaluate* gives the *figures* of a model, by name with their units; the first one is judged,
    by *bound*, relative to bsp's in per cent if *relative*. *batches* are a worker's, given the batch of all
    workers, a seed, its rank and their number."""

    name: str
    steps: int
    batch: int
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Callable[..., Any]
    batches: Callable[[int, int, int, int], Iterator[Any]]
    loss: Callable[..., torch.Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    bound: float
    relative: bool
    rate: float
    figures: dict[str, str]


@cache
def digits_data():
    return digits.load_data()


@cache
def bytes_data():
    return bytes_lm.load_data(1.0)


def digits_batches(batch, seed, rank, workers):
    (images, labels), _ = digits_data()
    sampler = DistributedSampler(range(len(images)), workers, rank, seed=seed)
    share = batch // workers
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        own = torch.tensor(list(sampler))
        for chosen in own[: len(own) // share * share].split(share):
            yield images[chosen], labels[chosen]
        epoch += 1


def bytes_batches(batch, seed, rank, workers):
    own = torch.Generator().manual_seed(seed * workers + rank)
    return bytes_lm.batches(bytes_data()[0], batch // workers, own)


def evaluate_digits(model):
    _, (images, labels) = digits_data()
    with torch.no_grad():
        out = model(images)
    right = (out.argmax(1) == labels).float().mean()
    return {
        "accuracy": 100 * right.item(),
        "test loss": F.cross_entropy(out, labels).item(),
    }


def evaluate_bytes(model):
    return {"bits per byte": bytes_lm.bits_per_byte(model, bytes_data()[1])}


def loss_of_bytes(out, y):
    return F.cross_entropy(out.transpose(1, 2), y)


def falling(optimizer, steps, rate):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


def one_cycle(optimizer, steps, rate):
    cycle = torch.optim.lr_scheduler.OneCycleLR
    return cycle(optimizer, max_lr=rate, total_steps=steps + 1)


def half_as_wide():
    """The model of examples/digits.py with half its channels: as accurate, and cheaper."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def small_byte_model():
    return bytes_lm.ByteModel(width=32, layers=1)


DIGITS = Task(
    name="digits",
    steps=192,
    batch=64,
    model=half_as_wide,
    optimizer=lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9, fused=True),
    schedule=falling,
    batches=digits_batches,
    loss=F.cross_entropy,
    evaluate=evaluate_digits,
    bound=0.3,
    relative=False,
    rate=0.1,
    figures={"accuracy": "%", "test loss": ""},
)
BYTES = Task(
    name="bytes_lm",
    steps=192,
    batch=16,
    model=small_byte_model,
    optimizer=lambda p, rate: torch.optim.AdamW(p, lr=rate, fused=True),
    schedule=one_cycle,
    batches=bytes_batches,
    loss=loss_of_bytes,
    evaluate=evaluate_bytes,
    bound=0.5,
    relative=True,
    rate=1e-2,
    figures={"bits per byte": "bits"},
)
TASKS = {task.name: task for task in (DIGITS, BYTES)}
