"""SWA: the average of the weights that a worker has had, and of all workers' such averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.methods.ds_sync.averaged_tensors import HALF


class Trajectory:
    """One worker's: a(n + 1) = a(n) + (w - a(n)) / (n + 1) over the weights w that it was
    shown (Izmailov et al., "Averaging weights leads to wider optima and better
    generalization", 2018, section 3.2). Half-precision weights have averages in single."""

    def __init__(self) -> None:
        self.count = 0
        """Of how many weights `averages` is the average."""
        self.averages: list[torch.Tensor] = []

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count the weights as they are now."""
        self.prepare(parameters)
        self.count += 1
        for average, parameter in zip(self.averages, parameters, strict=True):
            average.add_(
                parameter.detach().to(average.dtype) - average, alpha=1 / self.count
            )

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make room, where there is none yet."""
        if not self.averages:
            self.averages = [
                torch.zeros_like(
                    parameter, dtype=torch.float32 if parameter.dtype in HALF else None
                ).detach()
                for parameter in parameters
            ]

    def forget(self) -> None:
        """The weights are others from now on."""
        self.count = 0
        self.averages.clear()

    def save(self) -> dict[str, Any]:
        return {"count": self.count, "averages": list(self.averages)}

    def load(self, saved: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        self.forget()
        self.count = saved["count"]
        if self.count:
            self.prepare(parameters)
            for average, there in zip(self.averages, saved["averages"], strict=True):
                average.copy_(there)


def together(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What each of a job of another size goes on with: the average of all that were shown
    to those that saved, as if it had been shown as many as each of them."""
    total, workers = 0, 0
    averages: list[torch.Tensor] = []
    for part in parts:
        workers += 1
        count = part["count"]
        if not count:
            continue
        total += count
        if not averages:
            averages = [one.clone() for one in part["averages"]]
            continue
        for average, there in zip(averages, part["averages"], strict=True):
            average.add_(there - average, alpha=count / total)
    return {
        "count": max(bool(total), round(total / max(workers, 1))),
        "averages": averages,
    }
