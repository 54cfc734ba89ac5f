"""Small jobs to plan."""

from paceline.cluster import Workload, uniform_cluster


def layers(count=4, megabytes=4.0, forward=0.03, backward=0.06):
    """Equal layers, in that many seconds."""
    size = int(megabytes * 1e6 / 4) // count * 4
    return Workload(
        names=tuple(f"layer{i}" for i in range(count)),
        sizes=(size,) * count,
        forward=(forward / count,) * count,
        backward=(backward / count,) * count,
        batch=8.0,
        shapes=((size // 4,),) * count,
    )


def cluster(workers=4, link="100mbit", latency="50us", servers=0):
    return uniform_cluster(workers, link, latency, servers)
