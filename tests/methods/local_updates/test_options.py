"""What is said of options, and what is refused."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces import Placement
from paceline.methods import METHODS
from paceline.methods.local_updates import LocalSGD, LocalUpdates
from paceline.methods.local_updates.options import places_of
from tests.methods.local_updates.helpers import train
from tests.methods.local_updates.test_laws import apart

# ---- what is said, and what is refused ----


def test_the_gain_is_said_and_what_would_be_safer(capsys):
    train("diloco:sync_every=10", 2, 1)
    said = capsys.readouterr().err
    assert (
        "1.33 times as far as plain averaging in the first round, and 7 times" in said
    )
    assert "outer_learning_rate=0.3 would make it 3" in said
    train("diloco", 2, 1)
    assert "would make it" not in capsys.readouterr().err
    train("local-sgd", 2, 1)
    assert "times as far" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"sync_every": 0}, "sync_every=0: expected 1 or more"),
        ({"sync_each_step_until": -1}, "sync_each_step_until=-1: expected 0 or more"),
        ({"outer_learning_rate": -0.1}, "outer_learning_rate=-0.1: expected 0 or more"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0: .* less than 1"),
        ({"outer_momentum": -0.5}, "outer_momentum=-0.5: expected 0 or more"),
        ({"nesterov": True}, "nesterov=True: expected an outer_momentum above 0"),
        ({"rescale": True}, "rescale=True: expected an outer_momentum above 0"),
        ({"fragments": 3}, "fragments=3: expected a divisor of sync_every=8"),
        ({"fragments": 0}, "fragments=0: expected 1 or more"),
        ({"fragments": 2, "delay": 4}, "delay=4: expected less than 4 steps"),
        ({"delay": 8}, "delay=8: expected less than 8 steps"),
        ({"keep_local": 1.5}, "keep_local=1.5: expected 0"),
        ({"keep_local": -0.1}, "keep_local=-0.1: expected 0"),
        ({"delay": 2, "state": "average"}, "state=average: .* undo the steps"),
        ({"group": "2", "group_every": 3}, "group_every=3: expected a divisor of"),
        ({"group_every": 2}, "group_every=2: expected a group"),
        ({"group": "1"}, "group=1: a group of one"),
        ({"group": "row"}, "group=row: expected rack, host"),
        ({"group": "2", "fragments": 2}, "group=2: expected neither fragments nor"),
        (
            {"sync_each_step_until": 3, "group": "2"},
            "sync_each_step_until=3: expected neither",
        ),
    ],
)
def test_what_cannot_be_is_refused(keys, told):
    with pytest.raises(UsageError, match=f"local-sgd:{told}"):
        LocalSGD(**keys)


def refused_in_training(method, cluster=2):
    with pytest.raises(WorkerFailedError) as caught:
        train(method, cluster, 1)
    assert isinstance(caught.value.__cause__, UsageError)
    return str(caught.value)


def test_more_fragments_than_tensors_are_refused():
    told = refused_in_training("streaming-diloco:sync_every=10,fragments=5,delay=0")
    assert "fragments=5: the model has 4 parameters" in told


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
    method = METHODS["hierarchical-local-sgd"]
    comm = SimpleNamespace(size=4, placement=Placement((0, 1, 2, 3)))
    run = SimpleNamespace(comm=comm, cluster=None)
    for group in ("rack", "host"):
        with pytest.raises(UsageError, match=f"in which {group} each worker is"):
            places_of(method.name, group, run)
    comm.placement = Placement((0, 1, 2), (0, 0, 1))
    with pytest.raises(UsageError, match="has 3 workers, and this job 4"):
        places_of(method.name, "rack", run)


PRESETS = [cls for cls in METHODS.values() if LocalUpdates in cls.__mro__]


@pytest.mark.parametrize("cls", PRESETS, ids=lambda cls: cls.name)
def test_a_name_is_a_preset_and_nothing_else(cls):
    """Local SGD with another one's options does what that one does, the code apart that a name
    may have."""
    options = (
        {"sync_every": 4, "sync_each_step_until": 0} if cls().sync_every > 16 else {}
    )
    if cls().delay:
        options |= {"fragments": 2, "delay": 1}
    preset = cls(**options)
    named = {f.name: getattr(preset, f.name) for f in fields(preset)}
    if preset.has_groups:
        named["group"] = options["group"] = "2"
    methods = cls(**options), LocalSGD(**named)
    one, other = (train(m, 2, 5, compression="none") for m in methods)
    assert apart([one[0].end], [other[0].end]) == 0
