"""The conformance table: a row per registered method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.interfaces import Method


@dataclass(frozen=True, kw_only=True)
class Case:
    """One method, and what is particular about it.

    *method*: a spec or a method object. *timing_free*: its result depends on the data and
    not on who is fast, so all worlds end with the same parameters. *learning_rate* and
    *steps*: enough to solve the kit's quadratic. *reference*: the step that one worker
    alone takes, if it is not plain ``optimizer.step()``.
    """

    method: str | Method
    timing_free: bool = True
    learning_rate: float = 0.6
    steps: int = 60
    reference: Callable[[torch.optim.Optimizer], None] | None = None

    @property
    def name(self) -> str:
        """For test ids and messages."""
        return self.method if isinstance(self.method, str) else self.method.name


def _asynchronous(method: str) -> Case:
    """Workers that wait for nobody: gradients are stale, so steps are smaller."""
    return Case(method=method, timing_free=False, learning_rate=0.3, steps=150)


CASES: tuple[Case, ...] = (
    Case(method="bsp"),
    Case(method="bsp:overlap=false"),
    Case(method="bsp:collective=parameter-server"),
    _asynchronous("asp"),
    _asynchronous("ssp"),
    Case(method="ssp:staleness=0"),
    Case(method="backup"),
    Case(method="backup:overlap=false"),
)
"""Every registered method has at least one row."""
