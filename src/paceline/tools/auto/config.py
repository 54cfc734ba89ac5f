"""What the user wishes: ``auto``, ``auto:consistency=lossy``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import spec
from paceline.cluster import Cluster, load_cluster
from paceline.errors import UsageError, unknown
from paceline.interfaces import CONSISTENCIES, Consistency, Runtime

NAME = "auto"
FIRST = "bsp"
"""What training begins with."""
ALLOWED: tuple[Consistency, ...] = CONSISTENCIES[:-1]
"""Classes: all but asynchronous."""
CHOSEN_BY_AUTO = ("buckets", "collective", "compression", "replies")
"""Arguments of `distribute` that it chooses itself."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """*consistency*: the weakest class that may be chosen; all stronger ones may be, too. *cluster*: a file
    that describes the network, which then is not measured. *file*: where the decision is kept; empty:
    where `paceline.tools.auto.decision_cache` says."""

    consistency: Consistency = "exact"
    cluster: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise UsageError(
                unknown("value for consistency", self.consistency, ALLOWED)
            )
        if self.consistency == "asynchronous":
            raise UsageError(
                "auto:consistency=asynchronous: nobody bounds how late gradients are then, so whether a "
                "training learns as well cannot be told by its steps; name the method "
                "if that is what you want, or take exact, delayed, lossy or local"
            )

    @property
    def allowed(self) -> tuple[Consistency, ...]:
        """Classes that may be chosen, from the strongest promise to the weakest."""
        return ALLOWED[: ALLOWED.index(self.consistency) + 1]

    def load_cluster(self, workers: int) -> Cluster | None:
        """The network that a file describes; None where none is named. Raises `ClusterError`."""
        if not self.cluster:
            return None
        cluster = load_cluster(Path(self.cluster))
        if cluster.workers != workers:
            raise UsageError(
                f"auto:cluster={self.cluster}: it has {cluster.workers} workers, and this job "
                f"{workers}; leave it out, and the network is measured"
            )
        return cluster


def wish_of(text: str | None) -> Auto | None:
    """What a spec wishes; None where it is not ``auto``. Raises `UsageError` for keys that mean
    nothing."""
    if text is None or text.partition(":")[0].strip() != NAME:
        return None
    values = spec.parse(text).values
    known = set(spec.field_types(Auto))
    for key in values:
        if key in known:
            continue
        hint = unknown("key", key, known)
        raise UsageError(
            f"auto: {hint} Method, collective, compression and bucket rule are what it chooses"
        )
    return Auto(**spec.convert_fields(Auto, values, NAME))


def check_wish(
    runtime: Runtime, *, chosen_beside: Mapping[str, str], others: bool
) -> None:
    """Raise `UsageError` where nothing can be chosen: under ``--survive``, beside choices that it
    makes itself (*chosen_beside*, by argument), and beside another training (*others*)."""
    if runtime.server_only:
        raise UsageError(
            "method 'auto' under --survive: workers that meet only at their servers agree on no "
            "change; name a method whose server updates (`paceline plan SCRIPT` compares them)"
        )
    for name, value in chosen_beside.items():
        raise UsageError(
            f"distribute(method='auto', {name}={value!r}): {name} is what auto chooses; leave it "
            f"out, or name the method, as method='{FIRST}', {name}={value!r}"
        )
    if others:
        raise UsageError(
            "method 'auto' while another model is trained: steps of two trainings cannot be told "
            "apart; name a method for both, or call finish() on the first"
        )


def say_alone(runtime: Runtime) -> None:
    """One worker: nothing can be chosen."""
    if runtime.rank == 0:
        print(
            f"paceline: auto: one worker sends nothing, so it is {FIRST}",
            file=sys.stderr,
            flush=True,
        )
