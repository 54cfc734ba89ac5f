"""The addresses of racks' aggregators, from a job's environment, and checks against the cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.interfaces import Placement, Runtime

AGGREGATORS_VARIABLE = "PACELINE_AGGREGATORS"
"""The address of each rack's aggregator: RACK=HOST:PORT, joined by commas."""


def aggregators_of(
    runtime: Runtime, environment: Mapping[str, str] = os.environ
) -> Mapping[int, tuple[str, int]] | None:
    """Return host and port of each rack's aggregator; None in the simulated runtime, which needs
    none.

    Raises `UsageError`.
    """
    if runtime.clock.is_virtual:
        return None
    return aggregators_from(environment.get(AGGREGATORS_VARIABLE, ""))


def aggregators_from(text: str) -> dict[int, tuple[str, int]]:
    """Return host and port by rack, from ``RACK=HOST:PORT`` joined by commas. Raises `UsageError`."""
    found: dict[int, tuple[str, int]] = {}
    for one in text.split(",") if text else ():
        rack, _, address = one.partition("=")
        host, _, port = address.rpartition(":")
        if not (rack.strip().isdecimal() and host and port.isdecimal()):
            raise UsageError(
                f"{AGGREGATORS_VARIABLE}: expected RACK=HOST:PORT, joined by commas, such as "
                f"0=10.0.0.9:29700, got {one!r}"
            )
        found[int(rack)] = (host.strip("[]"), int(port))
    return found


def check_found(at: Placement, runtime: Runtime) -> None:
    """Raise `UsageError` if the environment's addresses do not fit the cluster.

    If the cluster has aggregating racks, there must be addresses. Every address must belong to a
    rack of this job.
    """
    found = aggregators_of(runtime)
    if found is None:
        return
    cluster = runtime.cluster
    racks = () if cluster is None else cluster.racks
    described = [number for number, rack in enumerate(racks) if rack.aggregates]
    if described and not found:
        raise UsageError(
            f"racks {described} of this cluster aggregate, but their aggregators' addresses "
            "are unknown: start `paceline aggregate` at their switches, and export "
            f"{AGGREGATORS_VARIABLE}=RACK=HOST:PORT,... where workers are started"
        )
    of_workers = at.racks
    known = set(range(len(racks))) if of_workers is None else set(of_workers)
    if found and of_workers is None:
        raise UsageError(
            f"{AGGREGATORS_VARIABLE} names racks {sorted(found)}, but the workers' racks are "
            "unknown: give the cluster file of this job's hosts"
        )
    strange = sorted(set(found) - known - set(range(len(racks))))
    if strange:
        raise UsageError(
            f"{AGGREGATORS_VARIABLE} names racks {strange}; this job has {sorted(known)}"
        )
