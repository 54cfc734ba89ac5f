"""ASP: asynchronous parallel training over a parameter server.

Recht et al., "Hogwild!" (NIPS 2011) and Dean et al., "Large scale distributed deep networks"
(NIPS 2012, Downpour SGD): a gradient is applied when it comes, and whoever sent it goes
on with the parameters of that moment.

Momentum lives on the server, which steps n times as often as a worker: its horizon in
samples is n times shorter than under bsp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import Discipline, MethodSummary, PushedGradient, Shard
from paceline.methods.push_pull import PushPull


@dataclass(frozen=True, kw_only=True)
class ASP(PushPull):
    """Apply each gradient when it comes; answer at once."""

    name: ClassVar[str] = "asp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="nobody",
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "every gradient is applied once, at a learning rate of its weight (1/n) "
            "times the script's; how stale it is, is not bounded"
        ),
    )

    def server(self, workers: int) -> Discipline:
        return AsynchronousUpdates()


class AsynchronousUpdates(Discipline):
    """The server's half: w <- w - lr/n g_i."""

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        shard.apply(push)
        shard.reply(push)
