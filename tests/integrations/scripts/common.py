"""A small task, and what is printed of a model that has learnt it."""

from __future__ import annotations

import json
import sys
import warnings

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
