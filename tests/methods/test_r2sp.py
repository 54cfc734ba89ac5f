"""The ring of r2sp, by hand: who goes on when, on a real `ParameterServer`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces import Reply, Sender
from paceline.interfaces.server_messages import (
    Join,
    Leave,
    Load,
    Parameters,
    Push,
    Rejected,
    Request,
    Unit,
)
from paceline.methods.r2sp import R2SP, RoundRobin
from paceline.parameter_server.state_machine.server import ParameterServer

HYPERPARAMETERS: list[dict[str, Any]] = [
    {
        "lr": 1.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }
]


def join(buckets: int = 1, shard: int = 0) -> Join:
    return Join(
        options="",
        shard=shard,
        units=[[Unit(bucket, 0, 1, 0)] for bucket in range(buckets)],
        dtypes=["float64"] * buckets,
        optimizer="SGD",
        hyperparameters=HYPERPARAMETERS,
    )


def push(step: int, bucket: int = 0) -> Push:
    return Push(step=step, bucket=bucket, used=[True], hyperparameters=HYPERPARAMETERS)


def one() -> torch.Tensor:
    return torch.ones(1, dtype=torch.float64)


class Talk:
    """A server whose workers have all joined, and the requests of these."""

    def __init__(
        self, method: R2SP, workers: int, buckets: int = 1, shard: int = 0
    ) -> None:
        self.join, self.numbers = join(buckets, shard), dict[tuple[int, int], int]()
        self.ring = method.server(workers)
        assert isinstance(self.ring, RoundRobin)
        self.server = ParameterServer(workers, lambda _: self.ring)
        for worker in range(workers):
            self.ask(0.0, worker, self.join)
        for bucket in range(buckets):
            self.ask(0.0, 0, Load(bucket=bucket), one())

    def ask(
        self,
        now: float,
        worker: int,
        message: Request,
        payload: torch.Tensor | None = None,
        life: int = 0,
    ) -> list[Reply]:
        number = self.numbers.get((worker, life), 0)
        self.numbers[worker, life] = number + 1
        sender = Sender(worker, life, "", number)
        answers = self.server.on_request(sender, message, payload, now)
        for answer in answers:
            assert not isinstance(answer.message, Rejected), answer.message.reason
        return answers

    def push(self, now: float, worker: int, step: int, bucket: int = 0) -> list[int]:
        """Whoever goes on because of it."""
        return went_on(self.ask(now, worker, push(step, bucket), one()))

    def ring_at(self, now: float) -> list[int]:
        return went_on(self.server.on_timer(now))


def went_on(answers: list[Reply]) -> list[int]:
    """Workers, as they were answered."""
    return [a.to.worker for a in answers if isinstance(a.message, Parameters)]


# ---- by hand ----


def test_the_gap_is_a_part_of_a_steps_time_without_its_wait() -> None:
    talk = Talk(R2SP(warm_up=4), 2)
    assert talk.push(1.0, 0, 0) == [0]
    assert talk.push(3.0, 1, 0) == [1]
    assert talk.push(5.0, 0, 1) == [
        0
    ]  # the first 2 of 4 steps are not measured: not 4 s
    assert talk.push(11.0, 0, 2) == [0]  # 6 s
    for now, step in ((12.0, 1), (13.0, 2), (14.0, 3)):
        assert talk.push(now, 1, step) == [1]  # whoever comes, goes on
    assert talk.push(19.0, 0, 3) == [0]  # 8 s; worker 0 has done 4 steps, as all have
    # T = 7 s, and the gap is 7 / (1.2 * 2) s: the next turn is worker 1's, not before
    gap = 7.0 / 2.4
    assert talk.push(20.0, 1, 4) == []
    assert talk.server.next_deadline() == 19.0 + gap
    assert talk.ring_at(20.5) == []  # it is too early
    assert talk.ring_at(19.0 + gap) == [1]
    assert talk.server.next_deadline() is None  # worker 0 computes
    assert talk.push(22.0, 0, 4) == []  # after 3 s: T = 17 / 3 s
    second = 19.0 + gap + gap
    assert talk.ring_at(second) == [0]
    assert talk.push(second + 1.0, 1, 5) == []
    assert talk.server.next_deadline() == pytest.approx(second + 17 / 3 / 2.4)


def test_slack_divides_the_gap() -> None:
    gaps = {}
    for slack in (1.0, 1.25):
        talk = Talk(R2SP(warm_up=2, slack=slack), 2)
        for step in range(2):
            assert talk.push(0.5 + step, 1, step) == [1]
        assert talk.push(1.0, 0, 0) == [0]
        assert talk.push(11.0, 0, 1) == [0]
        assert talk.push(11.5, 1, 2) == []
        deadline = talk.server.next_deadline()
        assert deadline is not None
        gaps[slack] = deadline - 11.0
    assert gaps == {1.0: 10.0 / 2, 1.25: pytest.approx(0.8 * 10.0 / 2)}


def warm(workers: int, buckets: int = 1) -> Talk:
    """It is 20 s, all have done 2 steps, a gap is 10 / 1.2 / *workers*, and worker 1 has the
    next turn."""
    talk = Talk(R2SP(warm_up=2), workers, buckets)
    for now, step in ((10.0, 0), (20.0, 1)):
        for worker in reversed(range(workers)):
            for bucket in range(buckets):
                talk.push(now, worker, step, bucket)
    return talk


def test_who_comes_before_its_turn_waits_for_the_one_before() -> None:
    talk = warm(3)
    assert talk.push(21.0, 2, 2) == []
    assert talk.push(25.0, 0, 2) == []
    assert talk.server.next_deadline() is None  # it is worker 1's turn
    assert talk.push(40.0, 1, 2) == [1]  # late: at once
    gap = 7.5 / 3.6  # steps of 10 and of 5 s count only once worker 0 goes on
    assert talk.ring_at(40.0 + 10 / 3.6) == [2]
    assert talk.ring_at(40.0 + 20 / 3.6) == [0]
    assert talk.push(46.0, 1, 3) == []
    assert talk.server.next_deadline() == pytest.approx(40.0 + 20 / 3.6 + gap)


def test_a_step_is_answered_as_a_whole_with_the_parameters_of_its_turn() -> None:
    talk = warm(2, buckets=2)
    assert (
        talk.push(30.0, 1, 2, bucket=1) == []
    )  # its turn, and only a part of its step
    assert talk.server.next_deadline() is None
    assert talk.push(31.0, 0, 2, bucket=0) == []
    answers = talk.ask(32.0, 1, push(2, bucket=0), one())
    assert went_on(answers) == [1, 1]
    payloads = [answer.payload for answer in answers]
    values = {
        answer.message.bucket: payload.item()
        for answer, payload in zip(answers, payloads, strict=True)
        if isinstance(answer.message, Parameters) and payload is not None
    }
    # bucket 0: three of each; bucket 1: two of worker 0 and three of its own
    assert values == {0: 1.0 - 6, 1: 1.0 - 5}


def test_who_has_left_has_no_turn() -> None:
    talk = warm(3)
    talk.push(21.0, 2, 2)
    assert went_on(talk.ask(30.0, 1, Leave())) == [2]
    assert talk.push(31.0, 0, 2) == []
    assert talk.server.next_deadline() == 30.0 + 10 / 2.4  # two are left to go round
    assert talk.ring_at(40.0) == [0]


def test_who_leaves_instead_of_waiting_is_answered() -> None:
    talk = warm(3)
    assert talk.push(21.0, 2, 2) == []
    assert went_on(talk.ask(22.0, 2, Leave())) == [2]


def test_who_is_lost_has_no_turn_until_it_is_back() -> None:
    talk = warm(3)
    talk.push(21.0, 2, 2)
    assert went_on(talk.server.on_worker_lost(1, 0, 30.0)) == [2]
    assert talk.push(40.0, 0, 2) == [0]
    talk.ask(41.0, 1, talk.join, life=1)
    talk.push(42.0, 2, 3)
    assert talk.server.next_deadline() is None  # it takes part again: its turn
    assert went_on(talk.ask(50.0, 1, push(3), one(), life=1)) == [1]


def test_what_a_worker_does_while_it_is_away_is_no_step() -> None:
    talk = warm(2)
    talk.push(25.0, 1, 2)  # worker 0 computes
    talk.server.on_worker_lost(0, 0, 26.0)
    talk.ask(1000.0, 0, talk.join, life=1)
    talk.push(1000.0, 1, 3)
    went = went_on(talk.ask(1001.0, 0, push(3), one(), life=1))
    assert 0 in went
    talk.push(1002.0, 1, 4)
    # T is 10 s as before, and not near 1000
    assert talk.server.next_deadline() == pytest.approx(1001.0 + 10 / 2.4)


def test_if_worker_0_goes_the_next_one_is_measured() -> None:
    talk = Talk(R2SP(warm_up=2), 3)
    talk.push(1.0, 0, 0)
    talk.push(2.0, 1, 0)
    talk.server.on_worker_lost(0, 0, 3.0)
    assert talk.push(4.0, 2, 0) == [2]  # still warming up
    assert talk.push(6.0, 1, 1) == [1]  # the second of worker 1, after 4 s
    assert talk.push(6.5, 2, 1) == [2]  # it has caught up: the ring begins
    assert talk.push(7.0, 1, 2) == []
    assert talk.server.next_deadline() == 6.5 + 4.0 / 2.4


def test_the_ring_begins_where_all_have_done_equally_many_steps() -> None:
    """Else who waits in a barrier after step n would have the turn that another one needs
    for it."""
    talk = Talk(R2SP(warm_up=2), 3)
    for now, step in ((1.0, 0), (2.0, 1), (3.0, 2)):
        assert talk.push(now, 1, step) == [1]
    for now, step in ((4.0, 0), (8.0, 1)):
        assert talk.push(now, 0, step) == [0]
    # The warm-up is over: worker 1 is let begin no other step, and the others go on freely.
    assert talk.push(8.1, 1, 3) == []
    assert talk.server.next_deadline() is None
    assert talk.push(8.2, 2, 0) == [2]
    assert talk.push(8.3, 0, 2) == [0]
    assert talk.push(8.4, 2, 1) == [2]
    assert talk.push(8.5, 0, 3) == []
    assert talk.push(8.6, 2, 2) == [2]  # all have done 3: the ring begins
    gap = talk.server.next_deadline()
    assert gap is not None
    assert talk.ring_at(gap) == [0]
    gap = talk.server.next_deadline()
    assert gap is not None
    assert talk.ring_at(gap) == [1]


def test_who_has_not_joined_yet_is_waited_for() -> None:
    server = ParameterServer(2, lambda _: R2SP(warm_up=2).server(2))
    requests: list[tuple[Request, torch.Tensor | None]] = [
        (join(), None),
        (Load(bucket=0), one()),
    ]
    requests += [(push(step), one()) for step in range(3)]
    for number, (request, payload) in enumerate(requests):
        answers = server.on_request(Sender(0, 0, "", number), request, payload, 1.0)
        # It goes on twice; then worker 1 has yet to do as much.
        assert bool(answers) == (number < 4)
    server.on_request(Sender(1, 0, "", 0), join(), None, 2.0)
    first = server.on_request(Sender(1, 0, "", 1), push(0), one(), 3.0)
    assert went_on(first) == [1]
    second = server.on_request(Sender(1, 0, "", 2), push(1), one(), 4.0)
    assert went_on(second)[0] == 1


def test_who_leaves_meanwhile_is_not_waited_for() -> None:
    talk = Talk(R2SP(warm_up=2), 2)
    for now, step in ((1.0, 0), (2.0, 1)):
        assert talk.push(now, 0, step) == [0]
    assert talk.push(3.0, 0, 2) == []  # worker 1 has not caught up
    assert went_on(talk.ask(4.0, 1, Leave())) == [0]


def test_another_server_than_the_first_holds_nobody_back() -> None:
    talk = Talk(R2SP(warm_up=2), 2, shard=1)
    for step in range(9):
        assert talk.push(1.0 + step, 0, step) == [0]
    assert talk.server.next_deadline() is None


def test_a_restored_server_warms_up_again() -> None:
    talk = warm(2)
    talk.push(21.0, 1, 2)
    method = R2SP(warm_up=2)
    server = ParameterServer(2, lambda _: method.server(2))
    assert server.restore(talk.server.snapshot()) == 2  # worker 0 has done two steps
    for worker in range(2):
        server.on_request(Sender(worker, 1, "", 0), join(), None, 30.0)
    answers = server.on_request(Sender(1, 1, "", 1), push(3), one(), 31.0)
    assert went_on(answers) == [1]
    assert server.next_deadline() is None


@pytest.mark.parametrize("slack", [0.99, 0.0, -1.0, float("nan"), float("inf")])
def test_a_slack_below_1_is_refused(slack: float) -> None:
    with pytest.raises(UsageError, match="expected a number from 1 on"):
        R2SP(slack=slack)


def test_a_warm_up_that_measures_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 2 or more steps"):
        R2SP(warm_up=1)
