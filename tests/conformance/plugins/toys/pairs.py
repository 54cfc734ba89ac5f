"""Gossip: in each step other pairs of workers average their parameters."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.interfaces import (
    Clips,
    Comm,
    GradientSeen,
    MethodSummary,
    Rounds,
    Run,
    UpdatesOn,
)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Average the parameters of two workers each, drawn anew in each step."""

    name: ClassVar[str] = "pairs"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="one other worker, in every step",
        sends="the parameters, to that one",
        guarantees="the mean of all models is kept; after the last step all have it",
    )
    rounds: ClassVar[Rounds] = Rounds(groups=True)
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"

    seed: int = 0

    def start(self, run: Run) -> "PairsWorker":
        return PairsWorker(run, self.seed)


class PairsWorker:
    """One worker. It keeps nothing: the models themselves differ."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.seed = run, seed

    def after_update(self) -> None:
        run = self.run
        draw = torch.Generator().manual_seed(self.seed + run.step)
        order = torch.randperm(len(run.participants), generator=draw).tolist()
        drawn = [run.participants[place] for place in order]
        for pair in zip(drawn[::2], drawn[1::2], strict=False):
            if run.comm.rank in pair:
                self._average(run.comm.group(sorted(pair)))

    def finish(self) -> None:
        self.run.participate_until_all_finish()
        self._average(self.run.comm)

    def _average(self, among: Comm) -> None:
        run = self.run
        for pending in [run.average(p, among=among) for p in run.parameters]:
            pending.wait()
