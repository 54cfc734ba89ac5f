"""What is said of options, and groups that do not fit the network."""

from types import SimpleNamespace

import pytest

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces import Placement
from paceline.methods.local_updates.options import places_of
from tests.methods.local_updates.helpers import train


def test_the_gain_is_said_and_what_would_be_safer(capsys):
    train("diloco:sync_every=10", 2, 1)
    said = capsys.readouterr().err
    assert "1.33 times as far as plain averaging" in said
    assert "7 times" in said
    assert "outer_learning_rate=0.3 would make it 3" in said
    train("diloco", 2, 1)
    assert "would make it" not in capsys.readouterr().err
    train("local-sgd", 2, 1)
    assert "times as far" not in capsys.readouterr().err


def test_more_fragments_than_tensors_are_refused():
    method = "streaming-diloco:sync_every=10,fragments=5,delay=0"
    with pytest.raises(
        WorkerFailedError, match=r"fragments=5.* 4 parameters"
    ) as caught:
        train(method, 2, 1)
    assert isinstance(caught.value.__cause__, UsageError)


@pytest.mark.parametrize(
    ("racks", "told"),
    [
        ((1, 1, 1), "each worker is alone in its group"),
        ((3,), "all workers are in one group"),
        ((2, 1), ""),
    ],
)
def test_groups_that_change_nothing_are_told(racks, told, capsys):
    network = tuple(Rack(workers=n, link=1e8, latency=0.0, uplink=1e8) for n in racks)
    train("hierarchical-local-sgd:sync_every=4", Cluster(network), 1)
    said = capsys.readouterr().err
    assert told in said
    assert bool(told) == ("group=rack: " in said)


def test_a_group_of_which_nobody_knows_is_refused():
    """In a runtime that tells no network there are no racks; here one of other workers."""
    comm = SimpleNamespace(size=4, placement=Placement((0, 1, 2, 3)))
    run = SimpleNamespace(comm=comm, cluster=None)
    for group in ("rack", "host"):
        with pytest.raises(UsageError, match=f"in which {group} each worker is"):
            places_of("diloco", group, run)
    comm.placement = Placement((0, 1, 2), (0, 0, 1))
    with pytest.raises(UsageError, match="has 3 workers, and this job 4"):
        places_of("diloco", "rack", run)
