"""What a schedule costs on a cluster, without a runtime."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster import Cluster
from paceline.cluster.links import Agenda, Links
from paceline.collectives.timing import Phases, Play, Prices
from paceline.errors import UsageError
from paceline.interfaces import Schedule


def seconds(
    schedule: Schedule,
    cluster: Cluster,
    ranks: Sequence[int] | None = None,
    *,
    unit: float = 1,
    play: bool = False,
) -> float:
    """Seconds from a common start to the last rank's end, on idle links.

    One unit of *schedule*'s sizes is *unit* bytes. ``ranks[i]`` is the worker of *cluster* that is its rank i
    (None: all workers, in order). It is what the simulated runtime charges where nothing else
    moves: links are shared max-min fairly, messages take their latency, and the processors'
    time where *cluster* says what it costs. *play*: message by message, also what has a
    price. The cluster's rules count for nothing. Raises `UsageError` for other ranks
    than *schedule* has, and for workers that there are not.
    """
    workers = tuple(range(cluster.workers) if ranks is None else ranks)
    strangers = [worker for worker in workers if not 0 <= worker < cluster.workers]
    if len(workers) != schedule.ranks or strangers:
        raise UsageError(
            f"a schedule of {schedule.ranks} ranks: expected as many workers, each 0 to "
            f"{cluster.workers - 1}, got {list(workers)}"
        )
    agenda = Agenda()
    links = Links(agenda, cluster)
    ends: list[float] = []
    phases = None if play else schedule.priced
    if phases is not None:
        Phases(
            schedule,
            phases,
            Prices(cluster, workers),
            agenda,
            links,
            unit,
            lambda: ends.append(agenda.now),
        ).start()
    else:
        played = Play(
            schedule, workers, links, unit, "", lambda position: ends.append(agenda.now)
        )
        for position in range(len(workers)):
            played.present(position)
    agenda.run()
    return ends[-1]
