"""ASP: asynchronous parallel training over a parameter server.

Recht et al., "Hogwild!" (NIPS 2011) and Dean et al., "Large scale distributed deep networks"
(NIPS 2012, Downpour SGD). The server applies each gradient when it arrives. Its worker continues
with the parameters of that moment.

The server has the momentum, and steps n times as often as a worker. So the momentum's horizon in
samples is n times shorter than under bsp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import Discipline, MethodSummary, PushedGradient, Shard
from paceline.methods.push_pull import PushPull


@dataclass(frozen=True, kw_only=True)
class ASP(PushPull):
    """Apply each gradient when it arrives, and reply at once."""

    name: ClassVar[str] = "asp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Applies each gradient when it arrives.",
        source="Recht et al., Hogwild! (NIPS 2011); Dean et al., Downpour SGD (NIPS 2012)",
        use_when=(
            "workers always differ in speed, one server can serve all of them, and unbounded "
            "staleness does no harm"
        ),
        waits_for="no other worker",
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "The server applies every gradient once, at the script's learning rate times the gradient's weight, 1/n. "
            "Staleness has no bound."
        ),
        limits=(
            (
                "The server holds the momentum, and steps n times as often as a worker. So momentum "
                "covers n times fewer samples than under bsp."
            ),
        ),
    )

    def server(self, workers: int) -> Discipline:
        return AsynchronousUpdates()


class AsynchronousUpdates(Discipline):
    """Applies each gradient on the server when it arrives: w <- w - lr/n g_i."""

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        shard.apply(push)
        shard.reply(push)
