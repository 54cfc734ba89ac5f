"""gssp's discipline on the machines that carry parcels: connections break, workers and servers
die and come back, and each gradient is in once at each server."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.interfaces import Groups, HeldPush, Shard
from paceline.methods.group_members import members_text
from paceline.methods.gssp import GSSP
from paceline.methods.gssp.clocks import Clocks
from paceline.methods.gssp.discipline import GroupDiscipline
from paceline.parameter_server.state_machine.store import Store
from tests.support.mesh_net import Case, MeshNet

RATES = 1.0, 0.5, 0.125
"""Learning rates that follow a schedule: a parcel has gradients of several."""


def drawn(seed: int, **others: Any) -> tuple[Case, GSSP]:
    """Workers in two or three groups, by hand."""
    draw = random.Random(seed)
    servers = draw.choice([2, 3])
    of = [*range(servers), *(draw.randrange(servers) for _ in range(2))]
    steps = tuple(draw.randint(1, 6) for _ in of)
    case = Case(tuple(of), servers, steps, rates=RATES, **others)
    method = GSSP(
        members=members_text(of),
        staleness=draw.randint(0, 3),
        period=draw.randint(0, 3),
    )
    return case, method


def play(seed: int, lose: str = "", **others: Any) -> MeshNet:
    case, method = drawn(seed, **others)

    def make(net: MeshNet, number: int) -> GroupDiscipline:
        class Taken(GroupDiscipline):
            def pushed(self, shard: Shard, push: HeldPush) -> None:
                if not push.applied:
                    net.takes(int(push.gradient.argmax()), push.bucket)
                super().pushed(shard, push)

            def owed(self, shard: Shard) -> list[Any]:
                return [] if lose == "owed" else super().owed(shard)

        discipline = method.server(len(case.of))
        assert isinstance(discipline, GroupDiscipline)
        discipline.__class__ = Taken
        return discipline

    net = MeshNet(case, random.Random(seed), make)
    net.run()
    return net


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("agree", [True, False], ids=["agree", "differ"])
def test_each_gradient_is_in_once_whatever_connections_do(
    seed: int, agree: bool
) -> None:
    net = play(seed, agree=agree, cuts=seed % 5)
    net.check_end()
    assert not net.refusals


@pytest.mark.parametrize("seed", range(12))
def test_and_whoever_dies(seed: int) -> None:
    net = play(seed, cuts=1, deaths=2, kills=seed % 2)
    net.check_end()


@pytest.mark.parametrize("seed", range(12))
def test_meetings_end_though_groups_have_gates(seed: int) -> None:
    """Whoever waits where all meet is waited for inside its group by nobody: who comes back does
    not meet, and may be as far ahead as it likes."""
    net = play(seed, deaths=3, meets=frozenset({1, 3}))
    net.check_end()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 2])
def test_and_at_length(kills: int) -> None:
    for seed in range(100, 140):
        for agree in (True, False):
            others = {"agree": agree, "cuts": 3, "kills": kills, "peril": 0.02}
            play(seed, **others).check_end()


def test_what_nobody_is_told_at_the_end_would_be_missed() -> None:
    """A control."""
    nets = [play(seed, lose="owed", agree=False) for seed in range(5)]

    def check() -> None:
        for net in nets:
            net.check_end()

    with pytest.raises(AssertionError):
        check()


def test_after_a_meeting_all_of_a_group_go_on_together() -> None:
    """Without staleness: the first one's push is a round of all, as before."""
    clocks, members = Clocks(), Groups((0, 0, 1), 2)
    shard: Any = Scene({0: 4, 1: 4, 2: 9})
    clocks.look(shard, members, 0, (), lambda: 0)
    assert clocks.expected(4) == {0, 1}
    clocks.look(shard, members, 0, [0], lambda: 0)
    assert clocks.expected(4) == {1}
    clocks.look(shard, members, 0, [0, 1], lambda: 0)
    assert clocks.expected(4) == set()
    clocks.look(shard, members, 0, (), lambda: 7)
    assert clocks.expected(6) == set()
    assert clocks.expected(7) == {0, 1}


class Scene:
    """What `Clocks` sees of a shard: the workers' own clocks."""

    def __init__(self, clocks: dict[int, int]) -> None:
        self._clocks = clocks

    def expected(self, step: int) -> list[int]:
        return sorted(self._clocks)

    def clock(self, worker: int) -> int:
        return self._clocks[worker]


@pytest.mark.parametrize("seed", range(12))
def test_all_servers_die_and_each_worker_goes_on_with_its_own_step(
    seed: int,
) -> None:
    net = play(seed, ends=2, peril=0.01, by_step=True)
    net.check_each_step_once()


@pytest.mark.parametrize("what", ["note_applied_elsewhere", "set_applied"])
def test_a_server_that_does_not_know_whose_gradients_it_has_applies_some_twice(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, what, lambda *_: None)

    def holds(seed: int) -> bool:
        try:
            play(seed, ends=2, peril=0.01, by_step=True).check_each_step_once()
        except AssertionError:
            return False
        return True

    assert not all(map(holds, range(6)))
