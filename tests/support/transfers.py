"""The link model alone: when do these transfers end?"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from functools import partial

from paceline.cluster.bandwidth import BandwidthSharing, Flow
from paceline.cluster.cluster import Cluster


def transfer_times(
    cluster: Cluster, flows: Iterable[tuple[float, int, int, float]]
) -> list[float]:
    """End time in seconds of each flow, in the order given.

    A flow is ``(start_seconds, source_worker, destination_worker, bytes)``, a connection
    of its own; workers are numbered in the cluster's order. Flows that share a link share
    its bandwidth max-min fairly; a flow ends when its last byte has arrived, one latency
    after it was sent. A flow from a worker to itself ends when it starts.
    """
    wanted = list(flows)
    ends = [math.nan] * len(wanted)
    starts: list[tuple[float, int]] = []
    for number, (start, *_) in enumerate(wanted):
        heapq.heappush(starts, (float(start), number))

    sharing = BandwidthSharing(cluster.capacities)

    def arrived(number: int, now: float) -> None:
        _, source, destination, _ = wanted[number]
        ends[number] = now + cluster.latency(source, destination)

    now = 0.0
    while True:
        for flow in sharing.advance(now):
            flow.done(now)
        upcoming = min(starts[0][0] if starts else math.inf, sharing.next_end())
        if upcoming == math.inf:
            return ends
        now = upcoming
        while starts and starts[0][0] == now:
            _, number = heapq.heappop(starts)
            _, source, destination, size = wanted[number]
            path = cluster.path(source, destination)
            if not path or not size:
                arrived(number, now)
                continue
            done = partial(arrived, number)
            sharing.start(Flow(dict.fromkeys(path, 1), size, done))
