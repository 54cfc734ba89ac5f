"""Racks, from how fast and how far each pair of workers is."""

from __future__ import annotations

from collections.abc import Sequence

SAME_RATE = 0.75
"""Within a rack a pair gets at least this part of what both its hosts can do..."""

SAME_LATENCY = 3.0
"""...and takes at most this multiple of the shortest latency of either."""

NOTICEABLE = 2e-3
"""Seconds by which a latency must be longer to tell anything at all: waking up a process on
a busy machine may take nearly as long."""


def find_racks(
    goodput: Sequence[Sequence[float]],
    latency: Sequence[Sequence[float]],
    hosts: Sequence[int],
) -> list[int]:
    """Each worker's rack, numbered in order of first appearance.

    Two hosts are in one rack if a stream between them is as fast as the slower one of the
    two is anywhere, and as near; and if the same is true of all that are joined to either.
    A rack whose uplink is no slower than its hosts' links, and as near, cannot be told
    from its neighbour in this way.
    """
    n = len(hosts)
    leaders = sorted({hosts.index(host) for host in hosts})
    others = {i: [j for j in leaders if j != i] for i in leaders}
    best_out = {
        i: max((goodput[i][j] for j in others[i]), default=0.0) for i in leaders
    }
    best_in = {i: max((goodput[j][i] for j in others[i]), default=0.0) for i in leaders}
    nearest = {i: min((latency[i][j] for j in others[i]), default=0.0) for i in leaders}

    def near(i: int, j: int) -> bool:
        possible = min(best_out[i], best_in[j])
        shortest = min(nearest[i], nearest[j])
        far = latency[i][j] > max(SAME_LATENCY * shortest, shortest + NOTICEABLE)
        return goodput[i][j] >= SAME_RATE * possible and not far

    groups: list[list[int]] = []
    for i in leaders:
        for group in groups:
            together = sum(near(i, j) and near(j, i) for j in group)
            if 2 * together > len(group):
                group.append(i)
                break
        else:
            groups.append([i])
    rack_of_host = {
        hosts[leader]: number for number, group in enumerate(groups) for leader in group
    }
    return [rack_of_host[hosts[i]] for i in range(n)]
