"""Laws of r2sp's ring on a real `ParameterServer`, whatever comes when and whoever dies."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces import Reply
from paceline.interfaces.server_messages import Done, Joined, Leave, Parameters
from paceline.methods.r2sp import R2SP, RoundRobin
from tests.methods.test_r2sp import Talk, one, push
from tests.support.profiles import examples


@dataclass
class Life:
    """One incarnation of a worker."""

    worker: int
    number: int
    left: bool = False
    done: bool = False
    steps: int = 0


class Turn(NamedTuple):
    """A worker went on."""

    time: float
    worker: int
    came: float
    """When its step was in."""
    here: frozenset[int]
    """Who took part then."""
    gap: float
    """To the next turn, at least."""
    warm: bool


@dataclass
class Scene:
    """Workers that compute and talk for random times; some die, and some come back."""

    workers: int
    buckets: int
    data: list[int]
    """Steps of each life, by worker."""
    deaths: list[tuple[float, int, float | None]]
    """When, who, and how long until it is back."""
    slack: float
    warm_up: int
    seed: int
    turns: list[Turn] = field(default_factory=list)

    def play(self) -> None:
        self.random = random.Random(self.seed)
        self.talk = Talk(
            R2SP(slack=self.slack, warm_up=self.warm_up), self.workers, self.buckets
        )
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.counter = 0
        self.lives = [Life(worker, 0) for worker in range(self.workers)]
        self.missing: dict[int, int] = {}
        self.came: dict[int, float] = {}
        for life in self.lives:
            self.go_on(life, 0, 0.0)
        for time, worker, absent in self.deaths:
            if worker < self.workers:
                self.after(time, lambda now, w=worker, a=absent: self.die(w, a, now))  # type: ignore[misc]
        while self.events or self.talk.server.next_deadline() is not None:
            deadline = self.talk.server.next_deadline()
            if deadline is None or (self.events and self.events[0][0] < deadline):
                now, _, action = heapq.heappop(self.events)
                action(now)
            else:
                self.take(self.talk.server.on_timer(deadline), deadline)
                assert self.talk.server.next_deadline() != deadline, "it would spin"

    def after(self, time: float, action: Callable[[float], None]) -> None:
        self.counter += 1
        heapq.heappush(self.events, (time, self.counter, action))

    def here(self, life: Life) -> bool:
        return self.lives[life.worker] is life

    def go_on(self, life: Life, step: int, now: float) -> None:
        if life.steps == self.data[life.worker]:
            self.after(now + self.random.random(), lambda at: self.leave(life, at))
            return
        life.steps += 1
        self.missing[life.worker] = self.buckets
        computed = now + self.random.uniform(0.5, 4.0)
        for bucket in self.random.sample(range(self.buckets), self.buckets):
            arrives = computed + self.random.random()
            self.after(arrives, lambda at, b=bucket: self.push(life, step, b, at))  # type: ignore[misc]

    def push(self, life: Life, step: int, bucket: int, now: float) -> None:
        if self.here(life):
            self.missing[life.worker] -= 1
            self.came[life.worker] = now
            request = push(step, bucket)
            answers = self.talk.ask(now, life.worker, request, one(), life.number)
            self.take(answers, now)

    def leave(self, life: Life, now: float) -> None:
        if self.here(life):
            life.left = True
            self.take(self.talk.ask(now, life.worker, Leave(), None, life.number), now)

    def die(self, worker: int, absent: float | None, now: float) -> None:
        before = self.lives[worker]
        life = self.lives[worker] = Life(
            worker, before.number + 1, left=True, done=True
        )
        self.take(self.talk.server.on_worker_lost(worker, before.number, now), now)
        if absent is not None:
            self.after(now + absent, lambda at: self.come_back(life, at))

    def come_back(self, life: Life, now: float) -> None:
        if self.here(life):
            life.left = life.done = False
            answers = self.talk.ask(now, life.worker, self.talk.join, None, life.number)
            self.take(answers, now)

    def take(self, answers: list[Reply], now: float) -> None:
        """Messages from the server, all of one moment."""
        parts: dict[int, list[Parameters]] = {}
        ring = self.talk.ring
        assert isinstance(ring, RoundRobin)
        for answer in answers:
            life = self.lives[answer.to.worker]
            assert life.number == answer.to.incarnation, "a word to a dead worker"
            if isinstance(answer.message, Parameters):
                parts.setdefault(life.worker, []).append(answer.message)
            elif isinstance(answer.message, Joined):
                if answer.message.over:  # an earlier life has done all of its steps
                    life.steps = self.data[life.worker]
                self.go_on(life, max(answer.message.step, answer.message.own), now)
            elif isinstance(answer.message, Done):
                life.done = True
        for worker, mine in parts.items():
            assert self.missing[worker] == 0, "it goes on in the middle of its step"
            assert {message.bucket for message in mine} == set(range(self.buckets))
            here = frozenset(self.talk.server.shard.active_workers(10**9))
            # All turns but the last of a moment come from gaps of no time.
            gap = ring._step_seconds / (self.slack * len(here))
            turn = Turn(now, worker, self.came[worker], here, gap, ring._is_warm)
            self.turns.append(turn)
            self.go_on(self.lives[worker], mine[0].step, now)

    # ---- laws ----

    def check(self) -> None:
        for life in self.lives:
            assert life.left, f"waits for ever: {life}"
            assert life.done, f"waits for ever: {life}"
        for turn in self.turns:
            if not turn.warm:
                assert turn.time == turn.came
        # The last turn before `warm` counts is the first of the ring.
        first = next((i for i, t in enumerate(self.turns) if t.warm), len(self.turns))
        ring = self.turns[first:]
        for before, turn in pairwise(ring):
            due = before.time + before.gap
            assert turn.time >= due or turn.gap == 0.0
            if not self.deaths and turn.here == before.here:
                # Nobody waits longer than for its predecessor, and the gap.
                assert turn.time == max(due, turn.came)
        for index, turn in enumerate(ring):
            self.check_round(ring, index, turn.worker)

    def check_round(self, ring: list[Turn], index: int, worker: int) -> None:
        """Until a worker's next turn, who took part all the time had exactly one."""
        following = range(index + 1, len(ring))
        again = next((i for i in following if ring[i].worker == worker), None)
        if again is None:
            return
        between = [turn.worker for turn in ring[index + 1 : again]]
        always = frozenset.intersection(*(t.here for t in ring[index : again + 1]))
        for other in always - {worker} if worker in always else ():
            assert between.count(other) == 1, (worker, other, between)


@st.composite
def scenes(draw: st.DrawFn, deadly: bool) -> Scene:
    workers = draw(st.integers(1, 5))
    death = st.tuples(
        st.floats(0.0, 40.0), st.integers(0, 4), st.none() | st.floats(0.0, 20.0)
    )
    return Scene(
        workers=workers,
        buckets=draw(st.integers(1, 3)),
        data=draw(st.lists(st.integers(0, 15), min_size=workers, max_size=workers)),
        deaths=draw(st.lists(death, min_size=1, max_size=6)) if deadly else [],
        slack=draw(st.sampled_from([1.0, 1.2, 1.25, 3.0])),
        warm_up=draw(st.sampled_from([2, 3, 10])),
        seed=draw(st.integers(0, 2**32)),
    )


QUICK = settings(max_examples=examples(60))


DEEP = settings(QUICK, max_examples=examples(600))


@pytest.mark.parametrize(
    "length", [QUICK, pytest.param(DEEP, marks=pytest.mark.slow)], ids=["quick", "deep"]
)
@pytest.mark.parametrize("deadly", [False, True], ids=["all live", "some die"])
def test_laws_of_the_ring(deadly: bool, length: settings) -> None:
    def laws(scene: Scene) -> None:
        scene.play()
        scene.check()

    length(given(scenes(deadly))(laws))()
