"""Who is in which life, how far, and done, of a job on Ray: a plain class, and no Ray.

An actor of it lives beside whoever called `integrations.ray.run`, and ends with that. It is told of each
beginning, and says what that makes of the job: another life, or the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PeerLostError, UsageError
from paceline.runtimes.real.supervised_worker import MOST_IN_VAIN, MOST_RESTARTS
from paceline.transport.protocol import HAS_BEEN_HERE

SERVER = "the server"
_LET_GO = ("taken for lost", HAS_BEEN_HERE)
"""What a server says to a life that it has let go of, or that it knows already: the next one may come."""


@dataclass(frozen=True)
class Life:
    """One life of a worker: its number, from 0; *done*: nothing is left to do."""

    number: int
    done: bool


@dataclass
class _Member:
    """What is known of one actor. *steps*: the job's step that it has reached; *node*: where it
    has begun its last life."""

    lives: int = 0
    in_vain: int = 0
    steps: int = 0
    node: str = ""


@dataclass(frozen=True)
class News:
    """What whoever called `run` is told: sentences, and why the job cannot go on, if so.
    *hang*: workers whose process is to be ended."""

    lines: list[str]
    fault: str
    hang: list[int]


@dataclass
class Coordinator:
    """Who is in which life, how far, and done, of so many *workers*. *snapshot*, *resume*: as
    `run` has them."""

    workers: int
    snapshot: str | None
    resume: bool = False
    _members: dict[str, _Member] = field(default_factory=dict)
    _results: dict[int, Any] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)
    _fault: str = ""
    _hang: list[int] = field(default_factory=list)

    def begins(self, rank: int, node: str) -> Life:
        """A worker's process has started, on *node*."""
        name = name_of(rank)
        member = self._begins(name, node)
        if rank in self._hang:  # whose process was to be ended has ended by itself
            self._hang.remove(rank)
        # With the server all end, whatever they are like.
        server = self._members.get(SERVER, _Member(lives=1))
        if member.lives > MOST_RESTARTS + server.lives:
            self.fails(f"{name} has died {MOST_RESTARTS} times")
        return Life(member.lives - 1, rank in self._results)

    def reached(self, rank: int, step: int) -> None:
        """A worker has done the job's step *step*."""
        member = self._members[name_of(rank)]
        member.steps, member.in_vain = step, 0
        if SERVER in self._members:
            self._members[SERVER].in_vain = 0

    def evicted(self, rank: int, life: int) -> None:
        """The server has taken this life for lost, and its process lives."""
        if life == self._members[name_of(rank)].lives - 1 and rank not in self._hang:
            self._hang.append(rank)

    def server_begins(self, node: str, has_snapshot: bool) -> list[int]:
        """The server's process has started; returns the workers that are done. Raises
        `UsageError` where nothing is left to go on from, or the snapshot may be another job's."""
        step = self._furthest()
        self._members.setdefault(SERVER, _Member()).steps = step
        life = self._begins(SERVER, node).lives
        if life == 1 and has_snapshot and not self.resume:
            self.fails(
                f"snapshot={self.snapshot!r}: the file exists, and may be what another job left; "
                "remove it to begin anew, or pass resume=True to go on from it"
            )
        if step and not has_snapshot:
            if self.snapshot is None:
                advice = "give snapshot=FILE, where all nodes reach it"
            else:
                advice = (
                    f"none was taken yet, or the node where it was started again does not reach "
                    f"{self.snapshot}"
                )
            self.fails(
                f"the parameter server died after step {step}, and there is no snapshot: {advice}"
            )
        if self._fault:
            raise UsageError(self._fault)
        return list(self._results)

    def server_goes_on(self, step: int) -> None:
        """The server listens, and goes on with *step*."""
        if self._members[SERVER].lives > 1:
            self._lines.append(
                f"the parameter server goes on from its snapshot of step {step}: what was done after "
                "that is done again"
            )
        for member in self._members.values():
            member.steps = min(member.steps, step)
        # Also of a job that was resumed and has done no step yet: who dies now has lost something.
        self._members[SERVER].steps = step

    def done(self, rank: int, result: Any) -> None:
        """A worker's loop has returned *result*."""
        self._results[rank] = result

    def look(self) -> News:
        """What has happened since this was last called."""
        lines, self._lines = self._lines, []
        hang, self._hang = self._hang, []
        return News(lines, self._fault, hang)

    def results(self) -> list[Any]:
        """In the order of ranks, once all are done."""
        return [self._results[rank] for rank in range(self.workers)]

    def _begins(self, name: str, node: str) -> _Member:
        member = self._members.setdefault(name, _Member())
        if member.lives:
            place = "" if node == member.node else " on another node"
            self._lines.append(
                f"{name} is gone (last heard of at step {member.steps}), and is started again{place}"
            )
        member.lives, member.node = member.lives + 1, node
        member.in_vain += 1
        if member.in_vain > MOST_IN_VAIN:
            self.fails(
                f"{name} has died {MOST_IN_VAIN} times in a row without a completed step: see "
                "above for what it said"
            )
        return member

    def _furthest(self) -> int:
        return max((member.steps for member in self._members.values()), default=0)

    def fails(self, fault: str) -> None:
        """The job cannot go on: the first cause is what its caller is told."""
        self._fault = self._fault or fault


def is_consequence(error: BaseException | None) -> bool:
    """Whether *error* only says that the server is gone, or has let this life go."""
    while error is not None:
        words = str(error)
        if isinstance(error, PeerLostError) or any(one in words for one in _LET_GO):
            return True
        error = error.__cause__ or error.__context__
    return False


def name_of(rank: int) -> str:
    """What a worker is called in sentences."""
    return f"worker {rank}"
