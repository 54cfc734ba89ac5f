"""A small task, and what is printed of a model that has learnt it.

All scripts here: ``of_X.py SIDE FOLDER CASE ...``, where SIDE is ``ddp`` or ``ours``, and a CASE is one of
the script's, ``NAME`` or, of ours, ``NAME@SPEC``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
OURS = "bsp:buckets=ddp"


def data(samples: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 20, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 4),
    )


def loader(shuffle: bool = True) -> DataLoader:
    return DataLoader(data(), 16, shuffle=shuffle)


def rivals() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """One that tells samples from others, and one that makes these of noise."""
    torch.manual_seed(0)
    layers, linear = torch.nn.Sequential, torch.nn.Linear
    critic = layers(linear(20, 16), torch.nn.LeakyReLU(), linear(16, 1))
    maker = layers(linear(8, 16), torch.nn.ReLU(), linear(16, 20))
    return critic, maker


def contend(
    inputs: torch.Tensor,
    nets: tuple[torch.nn.Module, torch.nn.Module],
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    backward: Callable[[torch.Tensor], None],
    quiet: AbstractContextManager[None],
) -> None:
    """A step of each: the maker's loss goes through the critic, whose gradient of that pass, which it does
    not apply, stays where it is while *quiet*."""
    (critic, maker), noise = nets, inputs[:, :8].flip(0)
    real, made = torch.ones(len(inputs), 1), torch.zeros(len(inputs), 1)
    with torch.no_grad():
        both = torch.cat([inputs, maker(noise)])
    optimizers[0].zero_grad()
    told = critic(both)
    backward(F.binary_cross_entropy_with_logits(told, torch.cat([real, made])))
    optimizers[0].step()
    optimizers[1].zero_grad()
    with quiet:
        told = critic(maker(noise))
        backward(F.binary_cross_entropy_with_logits(told, real))
    optimizers[1].step()


def each(train: Callable[..., dict[str, object]], known: dict[str, dict]) -> None:
    """Train all cases that are asked for; *train*, or what `known` has of the case as *by*, is given its
    side, method and folder, and what else `known` has of it, and returns what `show` takes."""
    side, folder, *words = sys.argv[1:]
    for case in words:
        name, _, method = case.partition("@")
        own = Path(folder, f"{name} {method}")
        options = {"by": train, **known[name]}
        by = options.pop("by")
        show(case, **by(side, method or OURS, own, **options))


def die_once(step: int) -> None:
    """Worker 1 is killed in its first incarnation, at that step."""
    first = os.environ["PACELINE_INCARNATION"] == "0"
    if first and os.environ["RANK"] == "1" and step == 8:
        os.kill(os.getpid(), signal.SIGKILL)


def show(case: str, rank: int, model: torch.nn.Module, **more: object) -> None:
    """One line for the test. Under DDP ranks other than 0 have old buffers at the end."""
    parameters = [p.double() for p in model.parameters()]
    line = {
        "case": case,
        "rank": rank,
        "sum": float(sum(p.sum() for p in parameters)),
        "absolute": float(sum(p.abs().sum() for p in parameters)),
        "buffers": float(sum(b.double().abs().sum() for b in model.buffers())),
        **more,
    }
    sys.stdout.write("\n=== " + json.dumps(line) + "\n")
    sys.stdout.flush()
