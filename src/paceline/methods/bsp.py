"""BSP: bulk-synchronous parallel training, gradients averaged in every step.

Valiant, "A bridging model for parallel computation" (1990) gave the name; what is done
here is what PyTorch DDP does (Li et al., VLDB 2020, section 3.2): buckets of gradients are
averaged while backward still runs, and ``.grad`` holds the mean when it ends.

Waits for: every worker, in every step. Sends: the whole gradient. Guarantees: all workers
hold the same parameters after every step.

Differs from DDP in that a rank's unused parameters and the end of its data are told to
the others only in the steps where there is something to tell (see `roll_call`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from paceline.interfaces import Clips, GradientSeen, Pending, Run, UpdatesOn
from paceline.methods.roll_call import (
    answer_roll_call,
    ask_for_roll_call,
    keep_company_to_the_end,
)
from paceline.tensors import Bucket


@dataclass
class BSPState:
    """What is under way within a step; empty between steps."""

    pending: list[Pending] = field(default_factory=list)
    """All-reduces, in bucket order."""
    own_element: torch.Tensor | None = None
    """This rank's value of the element that can carry a request for a roll call."""


@dataclass(frozen=True, kw_only=True)
class BSP:
    """Average every gradient over all workers in every step."""

    name: ClassVar[str] = "bsp"
    updates_on: ClassVar[UpdatesOn] = "worker"
    gradient_seen_by_user: ClassVar[GradientSeen] = "mean"
    clips: ClassVar[Clips] = "mean"

    overlap: bool = True
    """Send while backward still runs; without, after it: the textbook form that papers
    compare with."""

    def init(self, run: Run) -> BSPState:
        return BSPState()

    def bucket_ready(self, state: BSPState, run: Run, bucket: Bucket) -> None:
        if bucket.last:
            state.own_element = ask_for_roll_call(run, bucket.buffer)
        if self.overlap:
            state.pending.append(run.comm.all_reduce(bucket.buffer, "sum"))

    def backward_ended(self, state: BSPState, run: Run) -> None:
        if not self.overlap:
            state.pending += [run.comm.all_reduce(b.buffer, "sum") for b in run.buckets]
        for pending in state.pending:
            pending.wait()
        state.pending.clear()
        assert state.own_element is not None, "the last bucket was not delivered"
        factor = answer_roll_call(run, run.buckets[-1].buffer, state.own_element)
        state.own_element = None
        if factor != 1.0:
            for bucket in run.buckets:
                bucket.buffer.mul_(factor)

    def finish(self, state: BSPState, run: Run) -> None:
        source = keep_company_to_the_end(run)
        if source is not None:
            run.take_model(source)
