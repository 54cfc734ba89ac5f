"""A group server as a state machine: a server with the whole model for the workers of its group,
that passes on to the other servers what it applies, and applies what they pass on.

Transitions
-----------
What workers ask is in the table of `state_machine.server`; here is what it is for a server among others.

=========== ================================================= ===============================
event       what changes                                      answer
=========== ================================================= ===============================
a worker's  As at a server alone; then what the discipline    as there; at server 0 `Met`,
request     wants passed on goes to all active servers. It    and `Done` of a leave, once all
            waits while the server enters, or all meet. To a  servers agree (see
            server that is away it says: enter.               `consistent_cut`)
pass        Once for each source, life and number, in order,  `Done`, once that is so;
            when as many loads and meetings have ended here:  `Refused` for what does not
            the discipline applies it; buffers are mixed;     fit: then no server goes on
            its source is away.
tell        The discipline hears it, once, in order.          `Done`; `Refused` for what it
                                                              cannot read
trains      -                                                 `Done`; `Refused` where it is not
                                                              what is trained here
stand       -                                                 `Standing`
enter       The sender is active, and is given what *via*     `Standing`; `Manifest` of a
            has not answered.                                 copy, where this is *via*
copy        -                                                 `Copied`
drain       Nothing is done for workers; what is owed is      `Drained`, once all active
            passed on.                                        servers have answered all
agree       A copy of server 0 is taken; then workers are     `Done`
            served again.
peer lost   What it had passed on here, and others may not    -
            have, goes to these. What it has not answered
            waits.
peer back   What it has not answered is sent again.           -
timer       The discipline acts. Where a peer was away for    `Refused`, to all that wait
            too long, training cannot go on.
=========== ================================================= ===============================

A server other than 0 whose group has no workers, while others train, passes on what it owes, and
is *away*: nothing is passed on to it until it enters (see `entering`).

Modules
-------
- `local_server`: the server of the group's workers.
- `message_queue`: letters to peers, sent until they are answered.
- `update_log`: what is passed on, and what was taken; `outgoing`, what is told.
- `state_transfer`, `entering`, `consistent_cut`: how all of a server comes to another one.
- `membership`: whether this one is in the mesh; `incoming`: what the others say.
- here: who is told what, and who waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Ask, Sender, Server, Start, Work
from paceline.interfaces.server_messages import (
    Blend,
    Pass,
    PeerRequest,
    Pull,
    PullBuffers,
    PullState,
    Push,
    Refused,
    Reply,
    Request,
)
from paceline.parameter_server.groups.incoming import Hearing
from paceline.parameter_server.groups.local_server import NOW, Home
from paceline.parameter_server.groups.membership import Membership
from paceline.parameter_server.groups.message_queue import Mail, Peer
from paceline.parameter_server.groups.outgoing import Telling
from paceline.parameter_server.groups.update_log import Passing
from paceline.parameter_server.process.monitors import discipline_of
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.transport import liveness

USES_THE_MODEL = (Push, Pull, PullState, PullBuffers, Blend)
"""What a server answers from a model that has everything in it."""

Asked = tuple[Sender, Request, torch.Tensor | None]


class GroupServer:
    """The `AskingServer` of one group. *servers*: the names of all, in the order of their groups.
    Where sender *workers* + *i* asks, it is server *i*.

    *life*: larger than that of any process that was this server before. With *enters* others
    have what it begins with, and its workers wait until it has that, too: *entered* is called
    then. *patience*: seconds that a peer may be lost. *agree*: where all meet, servers take
    over what server 0 has. *around* wraps the machine that workers talk to.
    """

    def __init__(
        self,
        home: Home,
        servers: Sequence[str],
        *,
        life: int = 0,
        enters: bool = False,
        patience: float = math.inf,
        agree: bool = True,
        around: Callable[[ParameterServer], Server] = lambda machine: machine,
        entered: Callable[[], None] = lambda: None,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        number, self._name = home.number, servers[home.number]
        self.home, self._around = home, around(home)
        self.counts = home.counts
        self._patience = patience
        self._now = 0.0
        self._out: list[Answer | Ask] = []
        peers = {n: Peer(n, name) for n, name in enumerate(servers) if n != number}
        self._peers: Mapping[int, Peer] = peers
        self._mail = Mail(peers, self._out)
        self._passing = Passing(number, life, peers, self._mail, self._is_refused)
        self._telling = Telling(
            *(home, peers, self._mail, self._passing), mistaken=self._give_up
        )
        self._membership = Membership(
            *(home, peers, self._mail, self._passing, self._telling),
            agree=agree,
            entered=entered,
            gone=gone,
            mistaken=self._give_up,
        )
        self._entering = self._membership.entering
        self._meetings = self._membership.meetings
        self._hearing = Hearing(
            *(home, peers, self._passing, self._membership, self._out),
            mistaken=self._give_up,
        )
        self._fault = ""
        self._deferred: list[Asked] = []
        """What workers have asked, and are not served yet."""
        if enters and peers:
            self._entering.begin()
        elif enters:
            entered()

    # ---- the `AskingServer` ----

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Sequence[Answer | Ask]:
        self._now = now
        if sender.worker >= self.home.workers:
            self._of_peer(sender, message, payload)
        elif isinstance(message, PeerRequest):
            self._refuse(sender, "only the other servers of the job say that")
        elif self._fault:
            self._refuse(sender, self._fault)
        else:
            self._deferred.append((sender, message, payload))
        return self._settled()

    def on_lost(
        self, worker: int, incarnation: int, now: float
    ) -> Sequence[Answer | Ask]:
        self._now = now
        if worker < self.home.workers:
            self._out += self._around.on_lost(worker, incarnation, now)
        else:
            self._hearing.lost(worker, incarnation)
        return self._settled()

    def next_deadline(self) -> float | None:
        if self._out:
            return NOW
        deadlines = [self._around.next_deadline()]
        lost = [peer.lost[1] for peer in self._peers.values() if peer.lost is not None]
        if lost and not self._fault and self._patience < math.inf:
            deadlines.append(min(lost) + self._patience)
        return min((d for d in deadlines if d is not None), default=None)

    def on_timer(self, now: float) -> Sequence[Answer | Ask]:
        self._now = now
        deadline = self._around.next_deadline()
        if deadline is not None and now >= deadline:
            self._out += self._around.on_timer(now)
        for peer in self._peers.values():
            if peer.lost is not None and now >= peer.lost[1] + self._patience:
                self._give_up(
                    f"{peer.lost[0]}, and it was not there again within "
                    f"{self._patience:g} s"
                )
        return self._settled()

    def take_work(self) -> Work:
        return self._around.take_work()

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: Reply,
        payload: torch.Tensor | None,
        now: float,
    ) -> Sequence[Answer | Ask]:
        self._now = now
        try:
            self._mail.replied(self._mail.named(peer), number, reply, payload)
        except UsageError as error:
            self._give_up(str(error))
        return self._settled()

    def on_peer_lost(
        self, peer: str, reason: str, now: float
    ) -> Sequence[Answer | Ask]:
        self._now = now
        lost = self._mail.named(peer)
        self._mail.lost(lost, reason, now)
        self._passing.relay(lost.number)
        return self._settled()

    def on_peer_back(self, peer: str, now: float) -> Sequence[Answer | Ask]:
        """*peer* is there again after `on_peer_lost`."""
        self._now = now
        self._mail.back(self._mail.named(peer))
        return self._settled()

    @property
    def is_active(self) -> bool:
        """Whether it takes what is passed on."""
        return self._membership.is_active

    # ---- as `ParameterServer` has it ----

    def wait_for_the_lost(self) -> None:
        self.home.wait_for_the_lost()

    def on_done(self, worker: int, now: float) -> Sequence[Answer | Ask]:
        self._now = now
        self.home.on_done(worker, now)  # its answers leave by what is around it
        return self._settled()

    def is_over(self) -> bool:
        return self.home.is_over()

    def is_quiet(self) -> bool:
        return self.home.is_quiet()

    def snapshot(self) -> dict[str, Any]:
        return self.home.snapshot()

    def restore(self, saved: dict[str, Any]) -> int:
        return self.home.restore(saved)

    # ---- after each event ----

    def _settled(self) -> list[Answer | Ask]:
        """Do what can be done by now; returns what is to leave."""
        steps = self._hear, self._serve, self._go
        self._membership.now = self._now
        while any(step() for step in steps):
            pass
        out = self._out[:]
        self._out.clear()
        return out

    def _hear(self) -> bool:
        return self._hearing.take_what_waits(self._now)

    def _serve(self) -> bool:
        """Whether workers were answered, or asked something that was served."""
        served = False
        while self._deferred and not self._workers_wait():
            sender, message, payload = self._deferred.pop(0)
            answers = self._around.on_message(sender, message, payload, self._now)
            self._out += answers
            served = True
        if self.home.has_answers:
            self._out += self._around.on_timer(self._now)
            served = True
        return served

    def _go(self) -> bool:
        """Whether the mesh had something to do."""
        membership = self._membership
        told, met = membership.tell(), membership.meet()
        self.home.is_still = self._meetings.is_still
        gone = membership.go(wanted=bool(self._deferred))
        return told or met or gone

    def _workers_wait(self) -> bool:
        """Whether workers are not served now. The first one that waits may want this server to
        enter."""
        if self._entering.is_under_way or self._meetings.is_still:
            return True
        if self._membership.is_in or self.home.is_over():
            return False
        if not isinstance(self._deferred[0][1], USES_THE_MODEL):
            return False
        if not self._membership.is_active:
            self._entering.begin()
        return True

    def _refuse(self, sender: Sender, reason: str) -> None:
        self._out.append(Answer(sender, Refused(reason=reason)))

    def _give_up(self, reason: str) -> None:
        """Training cannot go on: let nobody wait for it, peers neither."""
        self._fault = self._fault or f"{self._name}: {reason}"
        self._hearing.give_up(self._fault)
        self._meetings.give_up(self._fault)
        self.home.give_up(self._fault)
        for sender, _, _ in self._deferred:
            self._refuse(sender, self._fault)
        self._deferred.clear()

    def _is_refused(self, peer: Peer, reason: str) -> None:
        self._give_up(f"{peer.name} does not take what was applied here: {reason}")

    # ---- what others say ----

    def _of_peer(
        self, sender: Sender, message: Request, payload: torch.Tensor | None
    ) -> None:
        peer = self._peers.get(sender.worker - self.home.workers)
        if peer is None or not isinstance(message, PeerRequest):
            self._refuse(sender, f"{self._name}: expected what its peers say")
            return
        if self._fault:
            self._refuse(sender, self._fault)
            return
        life = getattr(message, "life", None)
        if isinstance(message, Pass) and message.source != peer.number:
            life = None  # another server's
        # It may pass on what an earlier life of it has said.
        if life is not None and (peer.life is None or life > peer.life):
            self._lives(peer, life)
        try:
            self._hearing.hear(peer, sender, message, payload, self._now)
        except UsageError as error:
            self._refuse(sender, str(error))

    def _lives(self, peer: Peer, life: int) -> None:
        """A peer is in this life: it may have been started again."""
        before, peer.life = peer.life, life
        if before is None:
            return
        self._passing.relay(peer.number)
        self._passing.goes(peer)
        self._membership.lives_anew(peer)
        self._hearing.lives_anew(peer)
        self._telling.tell_again(peer)


def make_group_machine(
    start: Start,
    life: int = 0,
    enters: bool = False,
    around: Callable[[ParameterServer], Server] = lambda machine: machine,
    entered: Callable[[], None] = lambda: None,
    gone: Callable[[], None] = lambda: None,
) -> GroupServer:
    """The server of one group, as a service is told to start: see `GroupServer`. Raises
    `UsageError` where its peers are not the other servers of its job."""
    names = list(start.services)
    if start.name not in names or {*start.peers, start.name} != {*names}:
        raise UsageError(
            f"group server {start.name!r}: expected it among the services of its job, and all "
            f"others as its peers; got services {', '.join(names)} and peers "
            f"{', '.join(start.peers) or 'none'}"
        )
    number = names.index(start.name)
    discipline = None if start.method is None else start.method.server(start.workers)
    home = Home(
        *(number, start.workers, discipline, start.name),
        make=discipline_of if discipline is None else None,
        meets=number == 0,
    )
    return GroupServer(
        home,
        names,
        life=life,
        enters=enters,
        patience=liveness.patience(),
        around=around,
        entered=entered,
        gone=gone,
    )
