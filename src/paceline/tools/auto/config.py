"""The spec ``auto``, as in ``auto:consistency=lossy``: its settings, and the trainings that it refuses."""

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
"""The first method of a training."""
ALLOWED: tuple[Consistency, ...] = CONSISTENCIES[:-1]
"""All consistencies but asynchronous."""
CHOSEN_BY_AUTO = ("buckets", "collective", "compression", "replies")
"""Arguments of `distribute` that auto chooses itself."""


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """The keys of the spec.

    Attributes:
        consistency: The weakest consistency that may be chosen. All stronger ones may be, too.
        cluster: A file that describes the network, which then is not measured.
        file: File of saved decisions; empty: the default of `paceline.tools.auto.decision_cache`.
    """

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
                "auto:consistency=asynchronous: nothing bounds how stale gradients are then, so step "
                "times do not tell whether a training learns as well. Expected exact, delayed, lossy "
                "or local. To train asynchronously, name the method"
            )

    @property
    def allowed(self) -> tuple[Consistency, ...]:
        """Consistencies that may be chosen, the strongest first."""
        return ALLOWED[: ALLOWED.index(self.consistency) + 1]

    def load_cluster(self, workers: int) -> Cluster | None:
        """Return the network in the file; None without a file. Raises `ClusterError`."""
        if not self.cluster:
            return None
        cluster = load_cluster(Path(self.cluster))
        if cluster.workers != workers:
            raise UsageError(
                f"auto:cluster={self.cluster}: it has {cluster.workers} workers, and this job "
                f"{workers}. Leave it out to measure the network"
            )
        return cluster


def parse_auto(text: str | None) -> AutoConfig | None:
    """Return the configuration in a spec; None if it is not ``auto``.

    Raises:
        UsageError: A key is unknown.
    """
    if text is None or text.partition(":")[0].strip() != NAME:
        return None
    values = spec.parse(text).values
    known = set(spec.field_types(AutoConfig))
    for key in values:
        if key in known:
            continue
        hint = unknown("key", key, known)
        raise UsageError(
            f"auto: {hint} auto chooses method, collective, compression and bucket rule itself"
        )
    return AutoConfig(**spec.convert_fields(AutoConfig, values, NAME))


def check_auto_allowed(
    runtime: Runtime, *, chosen_beside: Mapping[str, str], others: bool
) -> None:
    """Raise `UsageError` if auto cannot choose anything in this training.

    Args:
        runtime: The runtime; under ``--survive`` workers cannot agree on a change.
        chosen_beside: Arguments of `CHOSEN_BY_AUTO` that the script sets itself.
        others: Whether another model is being trained.
    """
    if runtime.server_only:
        raise UsageError(
            "method 'auto' under --survive: workers that meet only at their servers cannot agree on "
            "a change. Name a method whose server updates (`paceline plan SCRIPT` compares them)"
        )
    for name, value in chosen_beside.items():
        raise UsageError(
            f"distribute(method='auto', {name}={value!r}): auto chooses {name} itself. Leave it "
            f"out, or name the method, as method='{FIRST}', {name}={value!r}"
        )
    if others:
        raise UsageError(
            "method 'auto' while another model is trained: step times of two trainings cannot be "
            "separated. Name a method for both, or call finish() on the first"
        )


def report_single_worker(runtime: Runtime) -> None:
    """Print that there is nothing to choose with one worker."""
    if runtime.rank == 0:
        print(
            f"paceline auto: one worker sends nothing, so it uses {FIRST}",
            file=sys.stderr,
            flush=True,
        )
