"""Groups equal workers of a cluster into classes, so that a few can represent all.

If a method treats all workers alike, workers of equal rack shape, speed, link and group do the same
at the same virtual times. So only two of each class run. Collectives are still charged over all
workers' links. Step times are equal to the full run's, to the last bit. Worker 0 represents only
itself. Other workers take its numbers by a sum, to which they add zeros.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.cluster import Cluster

AT_LEAST = 2
"""Representatives of a class, if it has as many workers. With a single one, all workers' gradients
would be equal."""
MOST_DESCRIBED = 4
"""The most representatives that `describe` lists with their weights."""


@dataclass(frozen=True)
class WorkerClasses:
    """Which workers of a cluster run, and how many workers each one represents.

    Args:
        representative_of: By worker, the one that runs for it; a representative's is itself.

    Example:
        ::

            classes = WorkerClasses.of(uniform_cluster(10_000, "1gbit", "50us"))
            classes.weights  # {0: 1, 1: 5000, 2: 4999}
    """

    representative_of: Sequence[int]

    @classmethod
    def of(cls, cluster: Cluster) -> WorkerClasses:
        """Choose worker 0 and two workers of each class.

        Workers of a class have equal rack shape, speed, link and group.
        """
        shapes: dict[Hashable, int] = {}
        members: defaultdict[Hashable, list[int]] = defaultdict(list)
        worker = 0
        for rack in cluster.racks:
            shape = shapes.setdefault(replace(rack, names=()), len(shapes))
            links, groups = rack.links, rack.groups
            for place in range(rack.workers):
                link = links[place // rack.workers_per_host]
                alike = shape, rack.speed[place], link, groups[place]
                members[alike].append(worker)
                worker += 1
        chosen = [0] * worker
        for one_class in members.values():
            if one_class[0] == 0:
                del one_class[0]
            for number, member in enumerate(one_class):
                chosen[member] = one_class[number % AT_LEAST]
        return cls(chosen)

    @property
    def weights(self) -> Mapping[int, int]:
        """By representative, in rank order, how many workers it represents, itself included."""
        return dict(sorted(Counter(self.representative_of).items()))

    def within(self, members: Sequence[int]) -> Sequence[int]:
        """Return, by position in a group, the position that represents it.

        It is the position of the member's representative. If the representative is not in the
        group, it is the first representative in the group.
        """
        index = {member: position for position, member in enumerate(members)}
        first = min(index[rank] for rank in self.weights if rank in index)
        return [index.get(self.representative_of[member], first) for member in members]

    def describe(self) -> str:
        """Return one line for the user."""
        weights = self.weights
        named = ", ".join(
            f"worker {rank} for {weight:,}"
            for rank, weight in list(weights.items())[:MOST_DESCRIBED]
        )
        more = (
            f" and {len(weights) - MOST_DESCRIBED} more"
            if len(weights) > MOST_DESCRIBED
            else ""
        )
        return (
            f"{len(weights):,} representatives ran for {len(self.representative_of):,} workers "
            f"({named}{more}); means are weighted"
        )
