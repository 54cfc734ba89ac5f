"""Laws of groups with a server each, under random schedules; and on the machines that carry updates:
connections break, workers and servers die and come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces import (
    Groups,
    GroupUpdate,
    PushedGradient,
    Sender,
    Shard,
    UpdatesOnServer,
)
from paceline.interfaces.server_messages import Load, Parameters, Pull, StateChunk
from paceline.methods.asp import ASP
from paceline.methods.group_members import members_text
from paceline.methods.grouping_sgd import GroupingSGD
from paceline.methods.gssp import GSSP
from paceline.methods.gssp.discipline import GroupClocks, GroupDiscipline
from paceline.methods.gssp.grouping import GroupNotice, encode
from paceline.methods.ssp import SSP
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.state_transfer import (
    StateSnapshot,
    StateTransfer,
)
from paceline.parameter_server.groups.update_log import Peer, UpdateLog
from paceline.parameter_server.state_machine.store import Store
from tests.parameter_server.state_machine.test_server import JOIN
from tests.parameter_server.state_machine.test_server import Case as OneServer
from tests.support.group_discipline_trial import SGD, GroupTrial, each
from tests.support.group_server_trial import Case, GroupServerTrial
from tests.support.profiles import examples

TIMES = st.lists(st.floats(0.2, 5.0), min_size=1, max_size=5)
MOMENTUM = SGD | {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def replies_of(trial: GroupTrial) -> list[tuple[int, int, int, int, list[float]]]:
    """All replies to pushes and pulls, in order."""
    return [
        (number, to.worker, message.bucket, message.step, payload.tolist())
        for number, (to, message, payload) in trial.answers
        if isinstance(message, Parameters) and payload is not None
    ]


def parameters(trial: GroupTrial, server: int) -> torch.Tensor:
    return torch.cat(trial.servers[server].shard.store.flats)


def members(sizes: Sequence[int]) -> str:
    """Groups by hand, of ranks that follow each other."""
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return "+".join(
        f"{stop - size}-{stop - 1}" for stop, size in zip(stops, sizes, strict=True)
    )


# ---- one group ----


@settings(max_examples=examples(30))
@given(TIMES, st.integers(0, 3), st.integers(0, 99), st.data())
def test_one_group_is_ssp_bit_for_bit(
    times: list[float], staleness: int, seed: int, data: st.DataObject
) -> None:
    steps = [data.draw(st.integers(1, 6)) for _ in times]
    dies = [(data.draw(st.floats(0.1, 20.0)), len(times) - 1)]
    dies = dies if data.draw(st.booleans()) else []

    def play(method: UpdatesOnServer) -> GroupTrial:
        return GroupTrial(
            method, each(*times), steps, 2, 0.5, 0.5, seed, dies, MOMENTUM
        ).play()

    one = play(GSSP(number_of_groups=1, staleness=staleness))
    assert replies_of(one) == replies_of(play(SSP(staleness=staleness)))


def test_another_bound_is_not() -> None:
    """A control."""
    plays = [
        replies_of(GroupTrial(method, each(1.0, 3.0), [6, 6], how=MOMENTUM).play())
        for method in (GSSP(number_of_groups=1, staleness=2), SSP(staleness=3))
    ]
    assert plays[0] != plays[1]


def test_one_group_without_staleness_is_bsp_applied_in_rank_order() -> None:
    trial = GroupTrial(
        GSSP(number_of_groups=1, staleness=0),
        each(3.0, 1.0, 2.0),
        [4, 4, 4],
        jitter=0.5,
        how=MOMENTUM,
    ).play()
    x = torch.nn.Parameter(torch.zeros(12, dtype=torch.float64))
    sgd = torch.optim.SGD([x], **(MOMENTUM | {"lr": MOMENTUM["lr"] * (1 / 3)}))
    for step in range(4):
        for worker in range(3):
            x.grad = torch.zeros(12, dtype=torch.float64)
            x.grad[4 * worker + step] = 1.0
            sgd.step()
    assert torch.equal(parameters(trial, 0), x.detach())


# ---- a group each ----


@settings(max_examples=examples(20))
@given(TIMES, st.integers(0, 99))
def test_a_group_for_each_is_asp_on_several_servers(
    times: list[float], seed: int
) -> None:
    n = len(times)
    method = GSSP(members=members([1] * n), staleness=1, period=1)

    def play(method: UpdatesOnServer, latency: float) -> GroupTrial:
        return GroupTrial(
            method, each(*times), [5] * n, 2, latency, 0.5, seed, how=MOMENTUM
        ).play()

    each_alone = play(method, latency=0.0)
    # Nobody waits for anybody.
    for worker, seconds in zip(each_alone.workers, times, strict=True):
        steps = [b - a for a, b in pairwise(worker.began)]
        assert all(its <= 1.51 * seconds for its in steps)
    # Updates that take no time come in the order of pushes: all servers are one.
    asp = play(ASP(), latency=0.0)
    for number in range(n):
        assert torch.equal(parameters(each_alone, number), parameters(asp, 0))


# ---- exactly once ----

METHODS = st.builds(
    GSSP,
    staleness=st.integers(0, 3),
    period=st.integers(0, 5),
    measure_steps=st.integers(1, 3),
    number_of_groups=st.integers(0, 2),
    most_groups=st.integers(2, 4),
)


RATES = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=3),
    min_size=2,
    max_size=2,
)


def play_any(data: st.DataObject) -> GroupTrial:
    times = data.draw(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5))
    steps = [data.draw(st.integers(1, 12)) for _ in times]
    method = data.draw(METHODS)
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(1, len(times)))
        sizes = [cut, len(times) - cut] if cut < len(times) else [cut]
        method = replace(method, members=members(sizes), number_of_groups=0)
    if data.draw(st.booleans()):
        other = data.draw(st.floats(0.2, 5.0))
        change = data.draw(st.floats(1.0, 20.0))
        first = times[0]
        seconds = each(*times)
        seconds[0] = lambda now: first if now < change else other
    else:
        seconds = each(*times)
    dies = [(data.draw(st.floats(0.1, 20.0)), 1)] if data.draw(st.booleans()) else []
    trial = GroupTrial(
        method, seconds, steps, 2, 2.0, 0.3, data.draw(st.integers(0, 99)), dies
    )
    trial.rates = data.draw(RATES)
    return trial.play()


@settings(max_examples=examples(60))
@given(st.data())
def test_every_gradient_is_applied_once_on_every_server(data: st.DataObject) -> None:
    trial = play_any(data)
    assert all(worker.ended or worker.lost for worker in trial.workers), "it hangs"
    trial.flush()
    for server in range(len(trial.servers)):
        for bucket in range(2):
            assert trial.ledger(server, bucket).allclose(trial.expected(bucket))


def wrong(update: GroupUpdate, how: str) -> list[GroupUpdate]:
    if how == "lost":
        return []
    if how == "twice":
        return [update, update]
    return [update._replace(weight=update.weight / 2)]


@pytest.mark.parametrize("how", ["lost", "twice", "half"])
def test_an_update_that_goes_wrong_would_be_seen(how: str) -> None:
    """A control of the laws above."""
    trial = GroupTrial(GSSP(members="0+1"), each(1.0, 1.5), [5, 5])
    seen: list[GroupUpdate] = []

    def tamper(to: int, update: GroupUpdate) -> list[GroupUpdate]:
        seen.append(update)
        return wrong(update, how) if len(seen) == 3 else [update]

    trial.tamper = tamper
    trial.play().flush()
    assert not all(
        trial.ledger(server, 0).allclose(trial.expected(0)) for server in range(2)
    )


# ---- inside a group ----


def ahead(trial: GroupTrial, worker: int, other: int) -> int:
    """How many steps *worker* was ahead when it began one, at most, while both trained."""
    mine, theirs = trial.workers[worker].began, trial.workers[other].began
    return max(
        number - max(0, sum(time <= now for time in theirs) - 1)
        for number, now in enumerate(mine)
        if now <= theirs[-1]
    )


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_who_waits_for_whom(staleness: int) -> None:
    method = GSSP(members="0-1+2-3", staleness=staleness)
    trial = GroupTrial(method, each(1.0, 1.2, 4.0, 4.4), [40, 40, 10, 10]).play()
    assert ahead(trial, 0, 1) <= staleness
    assert ahead(trial, 2, 3) <= staleness
    assert ahead(trial, 0, 2) > 20
    # The fast group is done when its slower one is: the other group holds up nobody.
    assert trial.workers[1].began[-1] <= 40 * 1.2


# ---- speeds ----


def test_groups_follow_measured_times_and_their_classes() -> None:
    times = [1.0, 4.0, 1.1, 2.0, 4.2, 2.1]
    trial = GroupTrial(GSSP(measure_steps=4), each(*times), [60] * 6, jitter=0.05)
    known: list[Groups] = []
    trial.after(
        50.0, lambda: known.extend(trial.discipline(q).groups for q in range(4))
    )
    trial.play()
    groups = known[0]
    assert known == [groups] * 4
    parts = {frozenset(groups.members(group)) for group in range(groups.servers)}
    assert parts == {frozenset(its) for its in ({0, 2}, {3, 5}, {1, 4}, ())}
    speeds = {groups.of[w]: groups.speeds[groups.of[w]] for w in range(6)}
    assert [speeds[groups.of[w]] for w in (0, 3, 1)] == ["fastest", "middle", "slowest"]
    assert all(trial.workers[w].group == groups.of[w] for w in range(6))
    trial.flush()
    for server in range(4):
        assert trial.ledger(server, 0).allclose(trial.expected(0))


def test_it_is_as_fast_as_asp_where_ssp_is_as_fast_as_the_slowest() -> None:
    times = [1.0, 1.0, 2.0, 2.0]

    def rate(method: UpdatesOnServer) -> float:
        """Steps of all in a second, in the second half of 100 s."""
        trial = GroupTrial(method, each(*times), [110] * 4, jitter=0.05)
        horizon = 100.0
        trial.play()
        began = [time for worker in trial.workers for time in worker.began]
        return sum(horizon / 2 < time <= horizon for time in began) / (horizon / 2)

    gssp, ssp, asp = rate(GSSP(measure_steps=5)), rate(SSP()), rate(ASP())
    assert gssp / ssp == pytest.approx(2.0 * (1 + 0.5) / 2, rel=0.05)
    assert gssp == pytest.approx(asp, rel=0.05)


def test_who_becomes_slow_for_good_gets_a_group_of_its_own() -> None:
    seconds = each(1.0, 1.0, 1.0, 1.0)
    seconds[2] = lambda now: 1.0 if now < 40 else 3.0
    trial = GroupTrial(GSSP(measure_steps=4), seconds, [200] * 4, jitter=0.02).play()
    of = trial.discipline(0).groups.of
    assert len({of[w] for w in (0, 1, 3)}) == 1
    assert of[2] != of[0]
    # It holds up nobody any more.
    assert trial.workers[0].began[-1] < 280


def test_groups_stay_where_they_are_not_to_change() -> None:
    seconds = each(1.0, 1.0, 3.0)
    seconds[1] = lambda now: 1.0 if now < 60 else 3.0
    trial = GroupTrial(GSSP(measure_steps=4, regroup=False), seconds, [90] * 3).play()
    of = trial.discipline(0).groups.of
    assert of[0] == of[1] != of[2]


# ---- relatives, on the same servers ----


@settings(max_examples=examples(30))
@given(TIMES, st.integers(0, 99), st.data())
def test_means_of_groups_count_as_much_on_every_server_and_at_most_once(
    times: list[float], seed: int, data: st.DataObject
) -> None:
    n, cut = len(times), data.draw(st.integers(1, len(times)))
    sizes = [cut, n - cut] if cut < n else [n]
    method = GroupingSGD(members=members(sizes))
    steps = [data.draw(st.integers(1, 8)) for _ in times]
    dies = (
        [(data.draw(st.floats(0.1, 20.0)), n - 1)] if data.draw(st.booleans()) else []
    )
    trial = GroupTrial(method, each(*times), steps, 2, 1.0, 0.5, seed, dies)
    trial.rates = data.draw(RATES)
    trial.play()
    assert all(worker.ended or worker.lost for worker in trial.workers), "it hangs"
    trial.flush()
    for bucket in range(2):
        first, once = trial.ledger(0, bucket), trial.expected(bucket)
        assert torch.equal(first > 0, once > 0)
        assert (first <= once + 1e-9).all()
        for server in range(1, len(trial.servers)):
            assert trial.ledger(server, bucket).allclose(first)


def test_who_is_back_after_all_were_lost_waits_for_the_others_gradients() -> None:
    """Of one group without staleness: no round has ended that nobody has begun."""
    case = OneServer(GroupingSGD()).begin(0, 1)
    for worker in (0, 1):
        case.whole_step(worker, 0)
    for worker in (0, 1):
        case.server.on_worker_lost(worker, 0, 0.0)
    for worker in (0, 1):
        case.ask(worker, JOIN, life=1)
    assert case.whole_step(0, 1, life=1) == []
    assert case.ask(0, Pull(bucket=0, step=2), life=1) == []
    assert len(case.whole_step(1, 1, life=1)) == 2 * 2 + 1


def test_a_mean_is_passed_on_though_only_one_gradient_of_it_is_new() -> None:
    """The other worker's is in from before its server's death."""
    trial = GroupTrial(GroupingSGD(members="0-1+2"), each(1.0, 1.0, 1.0), [1, 1, 1])
    for worker in range(3):
        trial.ask(0, worker, trial.join())
    trial.ask(0, 0, Load(bucket=0), trial.zeros())
    trial.servers[0].shard.store.set_applied({1: {0: 1}})
    for worker in trial.workers[:2]:
        trial.push(worker, 0)
    assert [(source, update.gradients) for source, update in trial.updates] == [(0, 1)]


def test_stale_means_count_for_less_and_as_much_everywhere() -> None:
    trial = GroupTrial(
        GroupingSGD(members="0+1"), each(1.0, 4.0), [16, 4], latency=0.0
    ).play()
    trial.flush()
    assert trial.ledger(0, 0).allclose(trial.ledger(1, 0))
    # In the time of one of its steps the other one does four, which is two steps of both.
    fast, slow = trial.ledger(0, 0)[0], trial.ledger(0, 0)[1, :4]
    assert slow[1:3].tolist() == pytest.approx([1 / 3, 1 / 3], rel=0.2)
    assert fast[1:3].tolist() == [1.0, 1.0]
    assert 2 / 3 <= fast.min() < 1.0


def test_a_class_outlives_the_slower_groups() -> None:
    trial = GroupTrial(GSSP(measure_steps=3), each(1.0, 3.0), [60, 6]).play()
    groups = trial.discipline(0).groups
    assert [groups.speeds[group] for group in groups.of] == ["fastest", "slowest"]


# ---- on the machines that carry updates ----

SCHEDULE = 1.0, 0.5, 0.125
"""Learning rates that follow a schedule: an update has gradients of several."""


def drawn(seed: int, **others: Any) -> tuple[Case, GSSP]:
    """Workers in two or three groups, by hand."""
    draw = random.Random(seed)
    servers = draw.choice([2, 3])
    of = [*range(servers), *(draw.randrange(servers) for _ in range(2))]
    steps = tuple(draw.randint(1, 6) for _ in of)
    case = Case(tuple(of), servers, steps, rates=SCHEDULE, **others)
    method = GSSP(
        members=members_text(of),
        staleness=draw.randint(0, 3),
        period=draw.randint(0, 3),
    )
    return case, method


def play_servers(seed: int, lose: str = "", **others: Any) -> GroupServerTrial:
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
@pytest.mark.parametrize(
    "faults",
    [
        {"agree": True, "cuts": 2},
        {"agree": False, "cuts": 2},
        {"cuts": 1, "deaths": 2, "kills": 1},
        {"deaths": 3, "meets": frozenset({1, 3})},
    ],
    ids=["adopt-state", "differ", "deaths", "meetings"],
)
def test_each_gradient_is_in_once_whatever_connections_do_and_whoever_dies(
    seed: int, faults: dict[str, Any]
) -> None:
    """Whoever waits where all meet is waited for inside its group by nobody: who comes back does
    not meet, and may be as far ahead as it likes."""
    trial = play_servers(seed, **faults)
    trial.check_end()
    assert not trial.refusals or "deaths" in faults


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 2])
def test_and_at_length(kills: int) -> None:
    for seed in range(100, 120):
        for agree in (True, False):
            others = {"agree": agree, "cuts": 3, "kills": kills, "peril": 0.02}
            play_servers(seed, **others).check_end()


def test_what_nobody_is_told_at_the_end_would_be_missed() -> None:
    """A control."""
    trials = [play_servers(seed, lose="owed", agree=False) for seed in range(5)]

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
    trial = play_servers(seed, ends=2, peril=0.01, by_step=True)
    trial.check_each_step_once()


@pytest.mark.parametrize("what", ["note_applied_elsewhere", "set_applied"])
def test_a_server_that_does_not_know_whose_gradients_it_has_applies_some_twice(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, what, lambda *_: None)

    def holds(seed: int) -> bool:
        try:
            play_servers(seed, ends=2, peril=0.01, by_step=True).check_each_step_once()
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
