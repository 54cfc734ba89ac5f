"""Workers that train different things are refused, whichever server each has joined first."""

import msgspec
import pytest

from paceline.interfaces import Sender
from paceline.messages import Join, Joined, Refused, Unit
from paceline.methods.gssp import GSSP
from paceline.server import kinds

NAMES = ("server 0", "server 1")


def joins(machine, worker, join):
    """What a server answers to a worker's request to take part."""
    said = machine.on_message(Sender(worker, 0, "", 0), join, None, 0.0)
    (answer,) = [one.message for one in said if hasattr(one, "to")]
    return answer


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"options": "gssp:staleness=4"}, "options is 'gssp:staleness=3'"),
        ({"compression": "int8"}, "compression is ''"),
        ({"answers": "differences"}, "answers is 'dense'"),
        ({"optimizer": "Adagrad"}, "optimizer is 'SGD'"),
    ],
)
def test_servers_that_workers_give_different_options_let_only_one_of_them_in(
    changes, what
):
    join = Join(
        options="gssp:staleness=3",
        method="gssp:members=0+1",
        units=[[Unit(parameter=0, start=0, stop=4, group=0, shape=(4,))]],
        dtypes=["float32"],
        optimizer="SGD",
        hyperparameters=[{"lr": 0.1}],
    )
    machines = [
        kinds.make(
            "group-server",
            kinds.Start(
                name,
                2,
                services=NAMES,
                peers=tuple(other for other in NAMES if other != name),
                method=GSSP(members="0+1"),
            ),
        )
        for name in NAMES
    ]
    words = [join, msgspec.structs.replace(join, **changes)]
    for rank in (0, 1):  # each is the first at one of them
        mine = msgspec.structs.replace(words[rank], shard=rank)
        assert isinstance(joins(machines[rank], rank, mine), Joined)
    answer = joins(machines[0], 1, words[1])
    assert isinstance(answer, Refused)
    assert what in answer.reason
    assert isinstance(joins(machines[1], 0, words[0]), Refused)
