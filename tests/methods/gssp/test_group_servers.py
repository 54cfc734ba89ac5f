"""gssp's discipline on the machines that carry updates: connections break, workers and servers
die and come back, and each gradient is in once at each server."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.interfaces import Groups, PushedGradient, Sender, Shard
from paceline.interfaces.server_messages import Load, StateChunk
from paceline.methods.group_members import members_text
from paceline.methods.gssp import GSSP
from paceline.methods.gssp.discipline import GroupClocks, GroupDiscipline
from paceline.methods.gssp.grouping import GroupNotice, encode
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.state_transfer import (
    StateSnapshot,
    StateTransfer,
)
from paceline.parameter_server.groups.update_log import Peer, UpdateLog
from paceline.parameter_server.state_machine.store import Store
from tests.support.group_server_trial import Case, GroupServerTrial

RATES = 1.0, 0.5, 0.125
"""Learning rates that follow a schedule: an update has gradients of several."""


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


def play(seed: int, lose: str = "", **others: Any) -> GroupServerTrial:
    case, method = drawn(seed, **others)

    def make(trial: GroupServerTrial, number: int) -> GroupDiscipline:
        class Taken(GroupDiscipline):
            def on_push(self, shard: Shard, push: PushedGradient) -> None:
                if not push.applied:
                    trial.takes(int(push.gradient.argmax()), push.bucket)
                super().on_push(shard, push)

            def take_all_updates(self, shard: Shard) -> list[Any]:
                return [] if lose == "owed" else super().take_all_updates(shard)

        discipline = method.server(len(case.of))
        assert isinstance(discipline, GroupDiscipline)
        discipline.__class__ = Taken
        return discipline

    trial = GroupServerTrial(case, random.Random(seed), make)
    trial.run()
    return trial


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("agree", [True, False], ids=["adopt-state", "differ"])
def test_each_gradient_is_in_once_whatever_connections_do(
    seed: int, agree: bool
) -> None:
    trial = play(seed, agree=agree, cuts=seed % 5)
    trial.check_end()
    assert not trial.refusals


@pytest.mark.parametrize("seed", range(12))
def test_and_whoever_dies(seed: int) -> None:
    trial = play(seed, cuts=1, deaths=2, kills=seed % 2)
    trial.check_end()


@pytest.mark.parametrize("seed", range(12))
def test_meetings_end_though_groups_have_gates(seed: int) -> None:
    """Whoever waits where all meet is waited for inside its group by nobody: who comes back does
    not meet, and may be as far ahead as it likes."""
    trial = play(seed, deaths=3, meets=frozenset({1, 3}))
    trial.check_end()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 2])
def test_and_at_length(kills: int) -> None:
    for seed in range(100, 140):
        for agree in (True, False):
            others = {"agree": agree, "cuts": 3, "kills": kills, "peril": 0.02}
            play(seed, **others).check_end()


def test_what_nobody_is_told_at_the_end_would_be_missed() -> None:
    """A control."""
    trials = [play(seed, lose="owed", agree=False) for seed in range(5)]

    def check() -> None:
        for trial in trials:
            trial.check_end()

    with pytest.raises(AssertionError):
        check()


def test_after_a_meeting_all_of_a_group_go_on_together() -> None:
    """Without staleness: the first one's push is a round of all, as before."""
    clocks, groups = GroupClocks(), Groups((0, 0, 1), 2)
    shard: Any = Scene({0: 4, 1: 4, 2: 9})
    assert clocks.update(shard, groups, 0, ()) == []
    assert clocks.expected_workers(4) == {0, 1}
    assert clocks.update(shard, groups, 0, [0]) == []
    assert clocks.expected_workers(4) == {1}
    assert clocks.update(shard, groups, 0, [0, 1]) == []
    assert clocks.expected_workers(4) == set()
    assert clocks.update(shard, groups, 0, ()) == [0, 1]
    for worker in (0, 1):
        clocks.enter(worker, 7)
    assert clocks.expected_workers(6) == set()
    assert clocks.expected_workers(7) == {0, 1}


def copy_state(source: LocalServer, target: LocalServer) -> None:
    """What a state transfer brings, without a network."""
    snapshot = StateSnapshot(1, source, UpdateLog(source.number, 0, {}), 0, True)
    peer = Peer(source.number, "source")
    trial: Any = SimpleNamespace(on_state_adopted=lambda manifest: None)
    StateTransfer(target, peer, 1, trial).begin(snapshot.manifest)
    for number, call in enumerate(list(peer.calls)):
        payload, entries = snapshot.part(number)
        call.then(StateChunk(entries=entries), payload if payload.numel() else None)


class Scene:
    """What `GroupClocks` sees of a shard: the workers' own clocks."""

    def __init__(self, clocks: dict[int, int]) -> None:
        self._clocks = clocks

    def active_workers(self, step: int) -> list[int]:
        return sorted(self._clocks)

    def clock(self, worker: int) -> int:
        return self._clocks[worker]


@pytest.mark.parametrize("seed", range(12))
def test_all_servers_die_and_each_worker_goes_on_with_its_own_step(
    seed: int,
) -> None:
    trial = play(seed, ends=2, peril=0.01, by_step=True)
    trial.check_each_step_once()


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


@pytest.mark.parametrize("load", ["here", "elsewhere"])
def test_groups_and_their_speeds_outlive_a_load(load: str) -> None:
    trial = GroupServerTrial(Case((0, 0), 2, (1, 1)), random.Random(0))
    servers = [LocalServer(n, 2, lambda _: GSSP().server(2)) for n in range(2)]
    for server in servers:
        for worker in range(2):
            server.on_request(Sender(worker, 0, "", 0), trial.join(0), None, 0.0)
        for bucket in range(2):
            sender = Sender(0, 0, "", 1 + bucket)
            server.on_request(sender, Load(bucket=bucket), trial.zeros(), 0.0)
    server, other = servers
    groups = Groups((0, 1), 2, 3, ("fastest", "slowest"))
    server.on_notice(1, encode(GroupNotice(groups)))
    before = server.discipline
    if load == "here":
        server.renew(5)
    else:
        other.renew(5)
        other.shard.loads = 1
        copy_state(other, server)
    assert server.discipline is not before
    assert server.discipline is not None
    assert server.discipline.groups == groups
