"""What a server process does: one training, or one after the other; and whom it takes for
lost though their connections stand."""

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
from paceline.messages import Joined, Leave, Push, Request
from paceline.server.protocol import ParameterServer
from paceline.server.serve import Shell
from paceline.spec import parse


def discipline_of(text: str, workers: int) -> Discipline:
    """What a server does under the method that a spec names. Raises `UsageError`."""
    method, _ = methods.make(parse(text), set())
    if method.updates_on != "server":
        raise UsageError(f"method {text!r} needs no server: its workers update")
    return cast(UpdatesOnServer, method).server(workers)


SILENT_SECONDS = 60.0
"""A worker may always be silent for so long,"""
SILENT_STEPS = 30
"""and for as long as so many steps usually take,"""
FIRST_STEP = 10
"""and so many times that before its first step is done: it may be compiling."""
LOOKS = 20
"""The watch looks up so often within the least silence, to know that itself was awake."""


def make_machine(workers: int, name: str) -> ParameterServer:
    """The state machine of a server that is told its method by who joins first."""
    # ZeroMQ over TCP loses nothing while a connection lives, so nothing is sent again.
    return ParameterServer(workers, name=name, make=discipline_of, remembers=False)


def make_shell(
    workers: int,
    name: str,
    address: str,
    port: int,
    token: str,
    server: Server | None = None,
) -> Shell:
    """A server for one training, listening; *server*: another than `make_machine`'s. Raises
    `UsageError` where it cannot."""
    machine = server or make_machine(workers, name)
    return Shell(machine, address, port, workers=workers, token=token)


@dataclass
class _Voice:
    """What was heard of one worker."""

    incarnation: int
    heard: float
    """When it last spoke, or was last answered."""
    owed: set[tuple[str, int]] = field(default_factory=set)
    """Its requests that are unanswered: while there are any, it may only wait."""
    step: int = -1
    began: float = 0.0
    """When the first push of *step* came."""
    steps: int = 0


class SilenceWatch:
    """A `Server` around *server* that takes a worker for lost whose connection stands but
    of which nothing is heard: its process is stopped, or hangs.

    Silence is counted from a worker's last message, or from the last answer to it if that is
    later, and only while no answer is owed to it: who waits for others is not silent.
    *least* seconds are always allowed, and so are `SILENT_STEPS` times the median of
    recent steps of all workers, and `FIRST_STEP` times as much until a worker has done a step
    (it may be compiling). A worker that is out of data keeps nobody waiting, and one that
    has not joined yet is not known here. Forward passes of any kind are heard of (`Note`);
    what takes longer than that without any looks like silence.

    Who does not listen hears nothing. So the watch wants to be called every now and then
    (`LOOKS`), and where it was not for twice as long, since a disk stalled a snapshot or the
    process itself was stopped, that time is nobody's silence, and nobody is lost before
    there was time to read what has come in meanwhile.

    *report* is told who was lost: worker, incarnation, seconds of silence.
    """

    def __init__(
        self,
        server: Server,
        least: float = SILENT_SECONDS,
        report: Callable[[int, int, float], None] = lambda *_: None,
    ) -> None:
        if not least > 0:
            raise UsageError(f"--evict-silent: expected more than 0 s, got {least}")
        self._server = server
        self._least = self._limit = least
        self._report = report
        self._voices: dict[int, _Voice] = {}
        self._durations: deque[float] = deque(maxlen=100)
        self._pulse = least / LOOKS
        self._looked = 0.0
        """When this was last called."""
        self._awake = 0.0
        """Since when it has been called as often as it wants to be."""

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        self._look_up(now)
        voice = self._voice_of(sender)
        if voice is not None:
            self._hear(voice, sender, message, now)
        answers = self._server.on_message(sender, message, payload, now)
        return self._heeded(answers, now)

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        self._look_up(now)
        voice = self._voices.get(worker)
        if voice is not None and voice.incarnation == incarnation:
            del self._voices[worker]
        return self._heeded(self._server.on_lost(worker, incarnation, now), now)

    def next_deadline(self) -> float | None:
        deadlines = [self._server.next_deadline()]
        deadlines += [self._deadline(v) for v in self._voices.values() if not v.owed]
        deadlines += [self._looked + self._pulse] if self._voices else []
        return min((d for d in deadlines if d is not None), default=None)

    def on_timer(self, now: float) -> list[Answer]:
        self._look_up(now)
        answers: list[Answer] = []
        deadline = self._server.next_deadline()
        if deadline is not None and now >= deadline:
            answers = self._heeded(self._server.on_timer(now), now)
        # Only here: what `next_deadline` says in between may be too early, and costs little.
        self._limit = self._least
        if self._durations:
            usual = statistics.median(self._durations)
            self._limit = max(self._least, SILENT_STEPS * usual)
        for worker, voice in list(self._voices.items()):
            if not voice.owed and now >= self._deadline(voice):
                self._report(worker, voice.incarnation, now - voice.heard)
                answers += self.on_lost(worker, voice.incarnation, now)
        return answers

    def take_work(self) -> Work:
        return self._server.take_work()

    def _look_up(self, now: float) -> None:
        """Called again: while nobody looked, nobody was silent."""
        away = now - self._looked
        self._looked = now
        if away > 2 * self._pulse:
            self._awake = now
            for voice in self._voices.values():
                voice.heard += away

    def _voice_of(self, sender: Sender) -> _Voice | None:
        voice = self._voices.get(sender.worker)
        known = voice is not None and voice.incarnation == sender.incarnation
        return voice if known else None

    def _hear(
        self, voice: _Voice, sender: Sender, message: Request, now: float
    ) -> None:
        voice.heard = now
        voice.owed.add((sender.channel, sender.number))
        if isinstance(message, Leave):
            del self._voices[sender.worker]
        elif isinstance(message, Push) and message.step != voice.step:
            if voice.step >= 0:
                self._durations.append(now - voice.began)
                voice.steps += 1
            voice.step, voice.began = message.step, now

    def _heeded(self, answers: list[Answer], now: float) -> list[Answer]:
        """The same; whoever gets an answer has until now been waiting for it."""
        for answer in answers:
            if isinstance(answer.message, Joined):  # maybe long after it has asked
                self._voices[answer.to.worker] = _Voice(answer.to.incarnation, now)
            voice = self._voice_of(answer.to)
            if voice is not None:
                voice.owed.discard((answer.to.channel, answer.to.number))
                voice.heard = now
        return answers

    def _deadline(self, voice: _Voice) -> float:
        allowed = self._limit * (1 if voice.steps else FIRST_STEP)
        return max(voice.heard + allowed, self._awake + self._pulse)
