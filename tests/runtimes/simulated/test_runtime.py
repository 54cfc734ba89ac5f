"""What a simulated worker knows of the network that it is on."""

from paceline.collectives.communicator import Communicator
from paceline.runtimes.join import join_runtime
from tests.support.simulations import cluster, rack, run


def test_workers_know_the_cluster_that_is_simulated() -> None:
    described = cluster(rack(2), rack(3, speed=(1.0, 0.5, 1.0)))

    def body(rank: int) -> list[int]:
        runtime = join_runtime()
        assert runtime.cluster is described
        comm = Communicator(runtime)
        assert (
            comm.placement.racks is not None
        )  # also where averages are formed natively
        assert list(comm.placement.racks) == [0, 0, 1, 1, 1]
        some = [0, 3, 4] if rank in (0, 3, 4) else [1, 2]
        return list(comm.group(some).placement.racks or [])

    assert run(described, body) == [[0, 1, 1], [0, 1], [0, 1], [0, 1, 1], [0, 1, 1]]
