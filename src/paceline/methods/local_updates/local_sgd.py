"""Local SGD: every worker steps by itself, and parameters are averaged every so many steps.

Stich, "Local SGD converges fast and communicates little" (ICLR 2019); McMahan et al.,
"Communication-efficient learning of deep networks from decentralized data" (AISTATS 2017),
whose FedAvg it is where all workers take part in each round.

With `state=average` the optimizer's moments are averaged, too: Local Adam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalUpdates):
    """Average the parameters after every eighth step, or every so many."""

    name: ClassVar[str] = "local-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every `every`-th step",
        sends="the parameters, once in `every` steps",
        guarantees=(
            "equal models after each round, the mean of what the workers had; with "
            "`every=1` and an optimizer that is linear in gradients (SGD with or "
            "without momentum) that is bsp, and with Adam it is not"
        ),
    )
