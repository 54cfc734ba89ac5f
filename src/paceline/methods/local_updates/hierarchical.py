"""Hierarchical local SGD: means inside each rack often, and of all workers rarely.

Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020),
section 5; Castiglia, Das and Patterson, "Multi-level local SGD" (ICLR 2021). It fits racks
with thin uplinks: most means never leave a rack.

With `group_every=1` and SGD a rack is one worker of local SGD with bsp inside. Groups are
`rack`, `host`, or a number of workers (the last group may have fewer). Who has trained on
more samples since the last mean of a kind weighs more in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(LocalUpdates):
    """Average the parameters in each rack in each step, and among all every so many."""

    name: ClassVar[str] = "hierarchical-local-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for=(
            "the workers of its own group in every `group_every`-th step, all in every"
            " `every`-th"
        ),
        sends="the parameters, as often",
        guarantees="equal models in a group after its means, and everywhere after those of all",
    )

    every: int = 16
    group: str = "rack"
    group_every: int = 1
