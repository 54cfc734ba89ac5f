"""Who averages with whom between two means of all workers."""

from __future__ import annotations

from typing import ClassVar, Protocol

from paceline.errors import UsageError
from paceline.interfaces import Comm, Run


class Grouped(Protocol):
    """A method's hyperparameters, with the groups that they name."""

    name: ClassVar[str]

    @property
    def group(self) -> str: ...


class Periods(Grouped, Protocol):
    """The same, with the steps between means of a group and of all workers."""

    @property
    def has_groups(self) -> bool: ...

    @property
    def group_every(self) -> int: ...

    @property
    def every(self) -> int: ...


def check_group(options: Grouped) -> None:
    """Raise `UsageError` unless a group is a place, or a number of workers."""
    if options.group in ("rack", "host"):
        return
    if not options.group.isdecimal():
        raise UsageError(
            f"{options.name}:group={options.group}: expected rack, host, or a number of "
            "workers"
        )
    if int(options.group) < 2:
        raise UsageError(
            f"{options.name}:group={options.group}: a group of one has nothing to "
            "average: expected 2 or more"
        )


def own_group(options: Periods, run: Run) -> Comm | None:
    """This worker's; None where there are none. Collective."""
    if not options.has_groups:
        return None
    places = places_of(options, run)
    said = f"{options.name}:group={options.group}"
    if len(places) > 1 and len(set(places)) == len(places):
        run.report(
            f"{said}: each worker is alone in its group, so nothing is averaged between "
            "two means of all"
        )
    elif len(places) > 1 and len(set(places)) == 1:
        run.report(
            f"{said}: all workers are in one group, so all of them average after "
            f"group_every={options.group_every} steps, and every={options.every} counts "
            "for nothing"
        )
    mine = [r for r, place in enumerate(places) if place == places[run.comm.rank]]
    return run.comm.group(mine)


def places_of(options: Grouped, run: Run) -> list[int]:
    """The number of each rank's group. Raises `UsageError` where nobody knows."""
    if options.group.isdecimal():
        return [rank // int(options.group) for rank in range(run.comm.size)]
    places = run.comm.racks if options.group == "rack" else _hosts(run)
    if places is None:
        raise UsageError(
            f"{options.name}:group={options.group}: nobody knows in which {options.group} "
            "each worker is: describe the network (paceline run --cluster FILE), or give "
            "the group as a number of workers, group=8 for example"
        )
    if len(places) != run.comm.size:
        raise UsageError(
            f"{options.name}:group={options.group}: the network that was described has "
            f"{len(places)} workers, and this job {run.comm.size}"
        )
    return list(places)


def _hosts(run: Run) -> list[int] | None:
    if run.cluster is None:
        return None
    hosts: list[int] = []
    for rack in run.cluster.racks:
        first = hosts[-1] + 1 if hosts else 0
        hosts += [first + n // rack.workers_per_host for n in range(rack.workers)]
    return hosts
