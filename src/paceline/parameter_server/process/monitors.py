"""A server process: what it serves, and which workers it takes for lost though their
connections stand."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch

from paceline import methods
from paceline.errors import UsageError
from paceline.interfaces import (
    Answer,
    Discipline,
    Sender,
    Server,
    UpdatesOnServer,
    Work,
)
from paceline.interfaces.server_messages import Joined, Leave, Push, Request
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.spec import parse
from paceline.timeouts import timeouts


def discipline_of(text: str, workers: int) -> Discipline:
    """The discipline of the method that a spec names. Raises `UsageError`."""
    method, _ = methods.make(parse(text), set())
    if method.updates_on != "server":
        raise UsageError(f"method {text!r} needs no server: its workers update")
    return cast(UpdatesOnServer, method).server(workers)


SILENT_STEPS = 30
"""A worker may be silent for as long as so many steps usually take."""
FIRST_STEP = 10
"""Before its first step is done a worker may be silent so many times as long: it compiles, say."""
LOOKS = 20
"""The watch is called so often within the least silence: so it knows that it was awake."""


def make_machine(workers: int, name: str) -> ParameterServer:
    """The state machine of a server whose method the first worker names."""
    # ZeroMQ over TCP loses nothing while a connection lives, so nothing is sent again.
    return ParameterServer(workers, name=name, make=discipline_of, remembers=False)


@dataclass
class _Heard:
    """What was heard of one worker."""

    incarnation: int
    last: float
    """When its last message came, or its last answer left."""
    owed: set[tuple[str, int]] = field(default_factory=set)
    """Its requests that are unanswered: while there are any, it may only wait."""
    step: int = -1
    began: float = 0.0
    """When the first push of *step* came."""
    steps: int = 0


class SilenceWatch:
    """A `Server` around *server* that takes a worker for lost whose connection stands but
    of which nothing is heard: its process is stopped, or hangs.

    A worker's silence begins with its last message, or with the last answer to it. A worker
    that an answer is owed to waits for others, and is not silent. Allowed are *least* seconds,
    or `SILENT_STEPS` times the median of all workers' recent steps if that is longer; before a
    worker's first step, `FIRST_STEP` times as much. Workers send a `Note` with each forward
    pass, so that an evaluation is no silence. A worker that is out of data keeps nobody
    waiting, and may be silent.

    The watch asks to be called every now and then (`LOOKS`). If it was not for twice as long,
    the time in between is nobody's silence: the process was stopped, say, or copied a large
    model. Then nobody is lost before there was time to read what has come meanwhile.

    *judges* is False of a worker that another server judges: it may wait there, and be silent
    here. Example: a worker waits at its group's server for the others of its group; servers of
    other groups hear nothing of it meanwhile.

    *report* is told of each loss: worker, incarnation, seconds of silence.
    """

    def __init__(
        self,
        server: Server,
        least: float = timeouts.worker_silent,
        report: Callable[[int, int, float], None] = lambda *_: None,
        judges: Callable[[int], bool] = lambda _: True,
    ) -> None:
        if not least > 0:
            raise UsageError(f"--evict-silent: expected more than 0 s, got {least}")
        self._server = server
        self._least = self._limit = least
        self._report = report
        self._judges = judges
        self._heard: dict[int, _Heard] = {}
        self._durations: deque[float] = deque(maxlen=100)
        self._pulse = least / LOOKS
        self._looked = 0.0
        """When the watch was last called."""
        self._awake = 0.0
        """Since when it has been called as often as it wants to be."""
        self._excused = 0.0
        """When the silence of those whom others judge was last forgotten."""

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        self._look_up(now)
        heard = self._heard_of(sender)
        if heard is not None:
            self._hear(heard, sender, message, now)
        answers = self._server.on_message(sender, message, payload, now)
        return self.heeded(answers, now)

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        self._look_up(now)
        heard = self._heard.get(worker)
        if heard is not None and heard.incarnation == incarnation:
            del self._heard[worker]
        return self.heeded(self._server.on_lost(worker, incarnation, now), now)

    def next_deadline(self) -> float | None:
        deadlines = [self._server.next_deadline()]
        deadlines += [self._deadline(v) for v in self._heard.values() if not v.owed]
        deadlines += [self._looked + self._pulse] if self._heard else []
        return min((d for d in deadlines if d is not None), default=None)

    def on_timer(self, now: float) -> list[Answer]:
        self._look_up(now)
        answers: list[Answer] = []
        deadline = self._server.next_deadline()
        if deadline is not None and now >= deadline:
            answers = self.heeded(self._server.on_timer(now), now)
        # Only here: what `next_deadline` says in between may be too early, and costs little.
        self._limit = self._least
        if self._durations:
            usual = statistics.median(self._durations)
            self._limit = max(self._least, SILENT_STEPS * usual)
        for worker, heard in list(self._heard.items()):
            if not heard.owed and now >= self._deadline(heard):
                self._report(worker, heard.incarnation, now - heard.last)
                answers += self.on_lost(worker, heard.incarnation, now)
        return answers

    def take_work(self) -> Work:
        return self._server.take_work()

    def _look_up(self, now: float) -> None:
        """The watch is called: the time in which it was not is nobody's silence."""
        away = now - self._looked
        self._looked = now
        if away > 2 * self._pulse:
            self._awake = now
            for heard in self._heard.values():
                heard.last += away
        if now >= self._excused + self._pulse:
            self._excused = now
            for worker, heard in self._heard.items():
                if not self._judges(worker):
                    heard.last = now

    def _heard_of(self, sender: Sender) -> _Heard | None:
        heard = self._heard.get(sender.worker)
        known = heard is not None and heard.incarnation == sender.incarnation
        return heard if known else None

    def _hear(
        self, heard: _Heard, sender: Sender, message: Request, now: float
    ) -> None:
        heard.last = now
        heard.owed.add((sender.channel, sender.number))
        if isinstance(message, Leave):
            del self._heard[sender.worker]
        elif isinstance(message, Push) and message.step != heard.step:
            if heard.step >= 0:
                self._durations.append(now - heard.began)
                heard.steps += 1
            heard.step, heard.began = message.step, now

    def heeded(self, answers: list[Answer], now: float) -> list[Answer]:
        """The same answers: until now their workers were waiting for them. For those, too, that
        the server behind this one gives by another way."""
        for answer in answers:
            if isinstance(answer.message, Joined):  # maybe long after it has asked
                self._heard[answer.to.worker] = _Heard(answer.to.incarnation, now)
            heard = self._heard_of(answer.to)
            if heard is not None:
                heard.owed.discard((answer.to.channel, answer.to.number))
                heard.last = now
        return answers

    def _deadline(self, heard: _Heard) -> float:
        allowed = self._limit * (1 if heard.steps else FIRST_STEP)
        return max(heard.last + allowed, self._awake + self._pulse)
