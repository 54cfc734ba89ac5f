"""Whether a Ray cluster has room for a job, and what is missing: words, and no Ray.

Each actor needs all that it asks for on one node. Requests go to nodes first fit, the largest first:
what is refused here may fit in rare mixtures that a cleverer search would find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.errors import UsageError

Resources = Mapping[str, float]
_OF_RAY = ("node:", "object_store_memory", "accelerator_type:")
"""What every node has, and nobody asks for."""


def nodes_of(told: Sequence[Mapping[str, Any]]) -> dict[str, Resources]:
    """What ``ray.nodes()`` tells: the resources of each node that is alive, by its id."""
    return {node["NodeID"]: node.get("Resources", {}) for node in told if node["Alive"]}


def without_room(
    requests: Mapping[str, Resources], nodes: Sequence[Resources]
) -> list[str]:
    """Those of *requests* (resources by name) that find no node."""
    left = [dict(node) for node in nodes]
    found_none = []
    for name in sorted(requests, key=lambda n: -sum(requests[n].values())):
        wanted = requests[name]
        for node in left:
            if all(node.get(what, 0.0) >= much for what, much in wanted.items()):
                for what, much in wanted.items():
                    node[what] = node.get(what, 0.0) - much
                break
        else:
            found_none.append(name)
    return [name for name in requests if name in found_none]


def check_room(requests: Mapping[str, Resources], nodes: Sequence[Resources]) -> None:
    """Raise `UsageError` for a cluster that could not hold all of *requests* if it were
    empty."""
    missing = without_room(requests, nodes)
    if not missing:
        return
    wanted = {what for request in requests.values() for what in request}
    sums = [
        f"{_sum_of(what, requests.values()):g} {what}, and its nodes have "
        f"{_sum_of(what, nodes):g}"
        for what in sorted(wanted)
    ]
    raise UsageError(
        f"the Ray cluster is too small: this job needs {'; '.join(sums)} ({described(nodes)}). "
        f"No node has room for {', '.join(missing)} ({needs(requests[missing[0]])} each, on one "
        "node): start more nodes (ray start --address=...), ask for less (workers=, "
        "resources_per_worker=, server_resources=), or pass grows=True where nodes are added when "
        "they are asked for"
    )


def needs(request: Resources) -> str:
    """``1 CPU, 0.5 GPU``."""
    return (
        ", ".join(f"{much:g} {what}" for what, much in request.items()) or "no resource"
    )


def described(nodes: Sequence[Resources]) -> str:
    """Nodes in words: ``2 nodes: 1 CPU | 4 CPU, 1 GPU``."""
    each = [
        needs(
            {k: v for k, v in n.items() if not k.startswith(_OF_RAY) and k != "memory"}
        )
        for n in nodes
    ]
    listed = " | ".join(sorted(each)) or "none"  # Ray tells them in any order
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}: {listed}"


def _sum_of(what: str, among: Iterable[Resources]) -> float:
    return sum(one.get(what, 0.0) for one in among)
