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
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
OURS = "bsp:fusion=ddp"


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


def each(train: Callable[..., dict[str, object]], known: dict[str, dict]) -> None:
    """Train all cases that are asked for; *train* is given its side, method and folder, and what
    `known` has of the case, and returns what `show` takes."""
    side, folder, *words = sys.argv[1:]
    for case in words:
        name, _, method = case.partition("@")
        own = Path(folder, f"{name} {method}")
        show(case, **train(side, method or OURS, own, **known[name]))


def die_once(step: int) -> None:
    """Worker 1 is killed in its first life, at that step."""
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
