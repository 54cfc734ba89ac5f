"""What a simulated worker knows of the network that it is on."""

from paceline.collectives.communicator import TorchComm
from paceline.runtimes.join import join_runtime
from tests.support.simulations import cluster, rack, run


def test_workers_know_the_cluster_that_is_simulated() -> None:
    described = cluster(rack(2), rack(3, speed=(1.0, 0.5, 1.0)))

    def body(rank: int) -> list[int]:
        runtime = join_runtime()
        assert runtime.cluster is described
        assert runtime.racks is not None
        assert list(runtime.racks) == [0, 0, 1, 1, 1]
        comm = TorchComm(runtime)
        assert comm.racks is not None
        assert list(comm.racks) == list(
            runtime.racks
        )  # also where averages are formed natively
        some = [0, 3, 4] if rank in (0, 3, 4) else [1, 2]
        return list(comm.group(some).racks or [])

    assert run(described, body) == [[0, 1, 1], [0, 1], [0, 1], [0, 1, 1], [0, 1, 1]]
