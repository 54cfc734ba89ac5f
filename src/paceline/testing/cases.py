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
    *steps*: enough to solve the kit's quadratic. *under_way*: between steps a part of an
    update is on its way, so a restart is not quite the same as no restart. *reference*: the step that one worker
    alone takes, if it is not plain ``optimizer.step()``.
    """

    method: str | Method
    timing_free: bool = True
    learning_rate: float = 0.6
    steps: int = 60
    under_way: bool = False
    reference: Callable[[torch.optim.Optimizer], None] | None = None

    @property
    def name(self) -> str:
        """For test ids and messages."""
        return self.method if isinstance(self.method, str) else self.method.name


def _deferring(method: str) -> Case:
    """A part of each gradient is a step late."""
    return Case(method=method, under_way=True, steps=100)


def _asynchronous(method: str) -> Case:
    """Workers that wait for nobody: gradients are stale, so steps are smaller."""
    return Case(method=method, timing_free=False, learning_rate=0.3, steps=150)


CASES: tuple[Case, ...] = (
    Case(method="bsp"),
    Case(method="bsp:overlap=false"),
    Case(method="bsp:collective=parameter-server"),
    Case(method="osp"),
    Case(method="osp:overlap=false,defer=nothing"),
    _deferring("osp:defer=most,budget=constant,most=0.5,chunk=16"),
    _deferring("osp:defer=most,budget=constant,most=1,chunk=16"),
    _asynchronous("asp"),
    _asynchronous("ssp"),
    Case(method="ssp:staleness=0"),
    Case(method="backup"),
    Case(method="backup:overlap=false"),
)
"""Every registered method has at least one row."""
