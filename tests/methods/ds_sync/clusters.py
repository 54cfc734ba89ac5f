"""Clusters of all kinds, for laws that hold on each."""

from hypothesis import strategies as st

from paceline.cluster import Cluster, Rack

LINK = 125e6


def rack(workers=4, uplink=0.25, slow=(), part=0.25, **options):
    """A rack whose *uplink* is that part of a host's link (None: no limit); the hosts *slow*
    have that *part* of theirs."""
    hosts = workers // options.get("workers_per_host", 1)
    return Rack(
        workers=workers,
        link=tuple(LINK * (part if host in slow else 1) for host in range(hosts)),
        uplink=None if uplink is None else uplink * LINK,
        latency=options.pop("latency", 50e-6),
        **options,
    )


def racks(count, workers, uplink=0.25):
    """That many alike."""
    return Cluster((rack(workers, uplink),) * count)


@st.composite
def any_rack(draw):
    per_host = draw(st.sampled_from([1, 1, 1, 2, 3]))
    hosts = draw(st.integers(1, 7))
    return Rack(
        workers=hosts * per_host,
        workers_per_host=per_host,
        link=tuple(
            LINK * draw(st.sampled_from([1, 1, 1, 0.5, 0.1])) for _ in range(hosts)
        ),
        uplink=draw(
            st.sampled_from(
                [None, *(part * LINK for part in (0.1, 0.25, 0.5, 1, 2, 3.3, 8))]
            )
        ),
        latency=draw(st.sampled_from([0.0, 50e-6, 5e-3])),
        speed=tuple(
            draw(st.sampled_from([1.0, 1.0, 1.0, 0.4])) for _ in range(hosts * per_host)
        ),
    )


any_cluster = st.lists(any_rack(), min_size=1, max_size=5).map(
    lambda drawn: Cluster(tuple(drawn))
)
