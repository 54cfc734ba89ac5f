"""OSP: overlapped synchronization parallel, in two stages.

Chen et al., "OSP: Boosting Distributed Model Training with 2-stage Synchronization" (ICPP
2023). Stage 1 (RS, reduced synchronization): most gradients are averaged before the step
ends, as under bsp. Stage 2 (ICS, in-computation synchronization): the rest, which a step would wait
for, travels while the next step computes. Until its mean arrives a worker computes with a
tentative step that it made of its own gradient (LGP, local-gradient-based parameter
correction); then the exact value takes that one's place, so no gradient is lost or applied
twice, and each is at most one step late.

Waits for: every worker, in every step, for what is not deferred. Sends: the whole gradient, the
deferred part of it while the next step computes. Guarantees: every gradient is applied once, in its order, at
most one step late; what is late is late only in the others' contributions.

Deferred is what is ready last, and not, as in the paper, what is least important: importance (PGP),
Σ|parameter x mean gradient| of a tensor, decides among equals. The text of the paper could not
be read beyond its abstract: mechanisms and names follow a reconstruction, and
``docs/osp.md`` says where it had a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.errors import UsageError
from paceline.interfaces import (
    EVERY_STEP,
    ON_SERVERS,
    Clips,
    Discipline,
    GradientSeen,
    Rhythm,
    Run,
    UpdatesOn,
)
from paceline.methods.osp import native, worker
from paceline.methods.osp.discipline import TwoStages
from paceline.methods.osp.options import OSPOptions
from paceline.tensors import Bucket


@dataclass(frozen=True, kw_only=True)
class OSP(OSPOptions):
    """Average what is ready early before the step ends, and the rest during the next one."""

    name: ClassVar[str] = "osp"
    gradient_seen_by_user: ClassVar[GradientSeen] = "local-sent"

    forms: ClassVar[Sequence[Mapping[str, str]]] = ({"collective": "native"},)
    """What else there is a row for in docs/methods.md."""

    collective: Literal["parameter-server", "native"] = "parameter-server"
    """Parameters on servers, which update them; or by all-reduce among workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction == "average" and self.collective != "native":
            raise UsageError(
                "osp:correction=average: workers see mean gradients only under "
                "collective=native; add that, or take correction=local"
            )

    @property
    def rhythm(self) -> Rhythm:
        return EVERY_STEP if self.collective == "native" else ON_SERVERS

    @property
    def updates_on(self) -> UpdatesOn:
        return "method" if self.collective == "native" else "server"

    @property
    def clips(self) -> Clips:
        return "mean" if self.defer == "nothing" else "own"

    @property
    def _form(self) -> Any:
        return native if self.collective == "native" else worker

    @property
    def coordinates(self) -> bool:
        return False

    def server(self, workers: int) -> Discipline:
        return TwoStages(self)

    def init(self, run: Run) -> Any:
        return self._form.begin(self, run)

    def bucket_ready(self, state: Any, run: Run, bucket: Bucket) -> None:
        self._form.bucket_ready(state, run, bucket)

    def backward_ended(self, state: Any, run: Run) -> None:
        self._form.backward_ended(state, run)

    def after_update(self, state: Any, run: Run) -> None:
        self._form.after_update(state, run)

    def finish(self, state: Any, run: Run) -> None:
        self._form.finish(state, run)

    def loaded(self, state: Any, run: Run) -> None:
        self._form.loaded(state, run)

    def consolidate(self, state: Any, run: Run) -> Callable[[], None]:
        undo: Callable[[], None] = self._form.consolidate(state, run)
        return undo
