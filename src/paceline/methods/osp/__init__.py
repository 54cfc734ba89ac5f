"""OSP: overlapped synchronization parallel, in two stages.

Chen et al., "OSP: Boosting Distributed Model Training with 2-stage Synchronization" (ICPP
2023). Stage 1 (RS, reduced synchronization): the gradients of important tensors are averaged
before the step ends, as under bsp. Stage 2 (ICS, in-computation synchronization): the rest
travels while the next step computes. Until its mean arrives a worker computes with a
tentative step that it made of its own gradient (LGP, local-gradient-based parameter
correction); then the exact value takes that one's place, so no gradient is lost or applied
twice, and each is at most one step late.

Waits for: every worker, in every step, for the important part of it. Sends: the whole gradient, the
unimportant part of it while the next step computes. Guarantees: every gradient is applied once, in its order, at
most one step late; what is late is late only in the others' contributions.

Importance (PGP) is Σ|parameter x mean gradient| of a tensor. The text of the paper could not
be read beyond its abstract: mechanisms and names follow a reconstruction, and
``docs/osp.md`` says where it had a choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.interfaces import GradientSeen, Run, UpdatesOn
from paceline.methods.osp import native
from paceline.methods.osp.native import NativeState
from paceline.methods.osp.options import OSPOptions
from paceline.tensors import Bucket


@dataclass(frozen=True, kw_only=True)
class OSP(OSPOptions):
    """Average what matters before the step ends, and the rest during the next one."""

    name: ClassVar[str] = "osp"
    gradient_seen_by_user: ClassVar[GradientSeen] = "local-sent"

    collective: Literal["native"] = "native"
    """By all-reduce among the workers."""

    @property
    def updates_on(self) -> UpdatesOn:
        return "method"

    def init(self, run: Run) -> NativeState:
        return native.begin(self, run)

    def bucket_ready(self, state: NativeState, run: Run, bucket: Bucket) -> None:
        native.bucket_ready(state, run, bucket)

    def backward_ended(self, state: NativeState, run: Run) -> None:
        native.backward_ended(state, run)

    def after_update(self, state: NativeState, run: Run) -> None:
        native.after_update(state, run)

    def finish(self, state: NativeState, run: Run) -> None:
        native.finish(state, run)

    def consolidate(self, state: NativeState, run: Run) -> Callable[[], None]:
        return native.consolidate(state, run)
