"""Dense first steps: gradients are sent as they are until training has settled.

Published compressors start late: torch's PowerSGD hook after 1,000 steps, deep gradient
compression after a warm-up of epochs. Early gradients are large and change their direction
quickly, and what a code leaves out of them comes back at a learning rate that has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compression.no_compression import summed
from paceline.compression.packing import reals
from paceline.compression.wrapper import Wrapper
from paceline.interfaces import COMMON, Coding, Compressor, Place, State, StateKind


@dataclass(frozen=True)
class Later(Wrapper):
    """A *code* that begins after the first *steps* sums of a tensor."""

    steps: int

    @property
    def state(self) -> StateKind:
        return "common" if self.code.state == "none" else self.code.state

    @property
    def decodes_per_worker(self) -> bool:
        """A push is a code from the first step on."""
        return False

    @property
    def first_steps(self) -> int:
        return self.steps

    def settled(self) -> Compressor:
        return self.code.settled()

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        return {COMMON: {"sums": 0}, "code": self.code.init(like, name, rank)}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        early = [state[COMMON]["sums"] < self.steps for state in states]
        for state in states:
            state[COMMON]["sums"] = min(state[COMMON]["sums"] + 1, self.steps)
        late = [not one for one in early]
        plain_sent = None if sent is None else reals(_chosen(sent, early))
        yield from summed(reals(_chosen(parts, early)), plain_sent)
        if any(late):
            codes = [state["code"] for state in _chosen(states, late)]
            theirs = None if sent is None else _chosen(sent, late)
            yield from self.code.average(_chosen(parts, late), codes, place, theirs)

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """What has begun goes on."""
        super().inherit(state, former, workers)
        if former:
            state[COMMON]["sums"] = max(old[COMMON]["sums"] for old in former)


def _chosen(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [value for value, one in zip(values, which, strict=True) if one]
