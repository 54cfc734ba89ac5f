"""OSP: overlapped synchronization parallel, in two stages.

Chen et al., "OSP: Boosting Distributed Model Training with 2-stage Synchronization" (ICPP
2023). Stage 1 (RS, reduced synchronization): most gradients are averaged before the step ends,
as under bsp. Stage 2 (ICS, in-computation synchronization): the rest, which a step would wait
for, travels while the next step computes. Until its mean arrives a worker computes with a
tentative step of its own gradient (LGP, local-gradient-based parameter correction); then the
exact value takes that one's place, so no gradient is lost or applied twice.

By default the gradients that are ready last are deferred. The paper defers the least important ones.
Here importance (PGP), the sum of abs(parameter x mean gradient), only breaks ties. Only the abstract of
the paper was available: ``docs/explanation/papers/osp.md`` lists the choices of this reconstruction.

- `options`: the hyperparameters.
- `worker`: the steps of a worker in both forms, and the layout of the model's pieces; start here.
- `all_reduce`, `parameter_server`: the two forms: how gradients travel, and the server's half.
- `deferral`: chooses the deferred pieces.
- `measurement`: step times, the budget, and how they are reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.interfaces import (
    EVERY_STEP,
    ON_SERVERS,
    Clips,
    Consistency,
    Discipline,
    GradientSeen,
    Groups,
    MethodSummary,
    Rounds,
    UpdatesOn,
)
from paceline.methods.osp.all_reduce import AllReduceWorker
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.parameter_server import ServerWorker, TwoStageDiscipline


@dataclass(frozen=True, kw_only=True)
class OSP(OSPOptions):
    """Average early gradients before the step ends, and the rest during the next one.

    Attributes:
        collective: ``parameter-server``: servers hold and update the parameters. Others: all-reduces among
            workers, by that collective.
    """

    name: ClassVar[str] = "osp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages early gradients within the step, and the others during the next step.",
        source="Chen et al., OSP (ICPP 2023)",
        use_when=(
            "steps wait for the network after backward, and gradients that are one step late do no "
            "harm"
        ),
        waits_for="every worker, in every step, for gradients that are not deferred",
        sends="the whole gradient, the deferred part of it during the next step",
        guarantees=(
            "Every gradient is applied once, in order, at most one step late. A worker's own part "
            "of a mean is never late."
        ),
        limits=(
            "`collective=native` needs no servers, and suits most users.",
            "On fast and on very slow networks it gains nothing: it measures the network, and defers no gradient there.",
            (
                "The algorithm is reconstructed from the abstract. By default it defers the gradients "
                "that are ready last, not the least important ones."
            ),
        ),
    )
    consistency: ClassVar[Consistency] = "delayed"
    steady_state_keys: ClassVar[Mapping[str, str]] = {"budget": "constant"}
    visible_gradient: ClassVar[GradientSeen] = "sent"
    coordinates: ClassVar[bool] = False
    forms: ClassVar[Sequence[Mapping[str, str]]] = ({"collective": "native"},)
    """Further forms that docs/reference/methods.md lists in rows of their own."""

    collective: Literal[
        "parameter-server",
        "native",
        "auto",
        "halving-doubling",
        "hierarchical",
        "rina",
        "ring",
        "switchml",
        "tree",
    ] = "parameter-server"

    @property
    def _on_servers(self) -> bool:
        return self.collective == "parameter-server"

    @property
    def rounds(self) -> Rounds:
        return ON_SERVERS if self._on_servers else EVERY_STEP

    @property
    def updates_on(self) -> UpdatesOn:
        return "server" if self._on_servers else "method"

    @property
    def clips(self) -> Clips:
        return "mean" if self.defer == "nothing" else "own"

    def groups(self, workers: int) -> Groups | None:
        return None

    def server(self, workers: int) -> Discipline:
        return TwoStageDiscipline(self)

    def start(self, run: Any) -> AllReduceWorker | ServerWorker:
        form = ServerWorker if self._on_servers else AllReduceWorker
        return form(run, self)
