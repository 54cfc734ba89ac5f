"""What the other group servers say to this one: each item is taken once, in its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Ask, Sender
from paceline.interfaces.server_messages import (
    Away,
    Copied,
    Copy,
    Done,
    Drain,
    Enter,
    Manifest,
    Pass,
    PeerRequest,
    Refused,
    Stand,
    Standing,
    Tell,
    Trains,
)
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.membership import Membership
from paceline.parameter_server.groups.message_queue import Item, Peer
from paceline.parameter_server.groups.update_log import Passing, line_of
from paceline.parameter_server.state_machine.checks import difference

Received = tuple[Peer, Sender, Pass | Tell | Enter, torch.Tensor | None]


class Hearing:
    """The requests of other servers, until they are answered; *out* is where answers leave.
    *mistaken* is told where they train something else."""

    def __init__(
        self,
        home: Home,
        peers: Mapping[int, Peer],
        passing: Passing,
        membership: Membership,
        out: list[Answer | Ask],
        mistaken: Callable[[str], None],
    ) -> None:
        self._home, self._peers, self._passing = home, peers, passing
        self._mistaken = mistaken
        self._membership, self._out = membership, out
        self._entering, self._meetings = membership.entering, membership.meetings
        self._waiting: list[Received] = []
        self._told: dict[int, int] = {}
        """By server: the number of what it tells next, in its life."""

    def hear(
        self,
        peer: Peer,
        sender: Sender,
        message: PeerRequest,
        payload: torch.Tensor | None,
        now: float,
    ) -> None:
        """A peer asks. Raises `UsageError` for what makes no sense."""
        if isinstance(message, Enter):  # what it has asked before is not meant any more
            self._waiting = [
                one
                for one in self._waiting
                if one[0] is not peer or not isinstance(one[2], Enter)
            ]
        if isinstance(message, Pass | Tell | Enter):
            self._waiting.append((peer, sender, message, payload))
            self.take_what_waits(now)
        elif isinstance(message, Trains):
            self._compare(peer, message)
            self._out.append(Answer(sender, Done()))
        elif isinstance(message, Stand):
            self._out.append(Answer(sender, self._membership.stands()))
        elif isinstance(message, Copy):
            self._give(peer, sender, message)
        elif isinstance(message, Drain):
            self._meetings.drain(sender)
        else:
            try:
                self._meetings.agree(peer, message)
            except UsageError as error:
                # Nothing is done for its workers any more: they are told why.
                self._mistaken(f"what {peer.name} has does not fit: {error}")
                raise
            self._out.append(Answer(sender, Done()))

    def _compare(self, peer: Peer, theirs: Trains) -> None:
        """Raises `UsageError` where a peer trains something else. Where that is not known here it
        is told later, and compares."""
        home = self._home
        ours = home.in_words() if home.meshed is not None else theirs.what
        if what := difference(ours, theirs.what):
            reason = (
                f"group servers train different things: {what} is {ours[what]} on server "
                f"{home.number} and {theirs.what.get(what)} on {peer.name}; build the same "
                "model, with the same options, on every worker"
            )
            self._mistaken(reason)
            raise UsageError(reason)

    def give_up(self, reason: str) -> None:
        """Training cannot go on: nothing is taken any more."""
        waiting, self._waiting = self._waiting, []
        for _, sender, _, _ in waiting:
            self._out.append(Answer(sender, Refused(reason=reason)))

    def lost(self, worker: int, incarnation: int) -> None:
        """The connection of a peer is lost: what waits comes again."""
        gone = worker, incarnation
        self._waiting = [one for one in self._waiting if one[1][:2] != gone]

    def lives_anew(self, peer: Peer) -> None:
        """A peer was started again."""
        self._told.pop(peer.number, None)

    def _give(self, peer: Peer, sender: Sender, copy: Copy) -> None:
        part = self._membership.part_of_copy(peer, copy.key, copy.part)
        payload, entries = part if part is not None else (None, [])
        self._out.append(Answer(sender, Copied(entries=entries), payload))

    # ---- what comes in an order ----

    def take_what_waits(self, now: float) -> bool:
        """Whether anything was taken that had to wait for what came before it, or for this
        server."""
        waiting, self._waiting = self._waiting, []
        blocked: set[tuple[int, object]] = set()
        for received in waiting:
            peer, sender, message, _ = received
            line = _line(peer, message)
            if line in blocked or self._has_to_wait(message):
                blocked.add(line)
                if isinstance(message, Pass) and message.source == peer.number:
                    blocked.add((peer.number, Enter))  # it has gone before, maybe
                self._waiting.append(received)
                continue
            try:
                self._take(received, now)
            except UsageError as error:
                self._out.append(Answer(sender, Refused(reason=str(error))))
        return len(self._waiting) < len(waiting)

    def _has_to_wait(self, message: Pass | Tell | Enter) -> bool:
        enters = self._entering.is_under_way
        if isinstance(message, Enter):
            return enters and message.via == self._home.number
        if isinstance(message, Tell):
            return enters or not self._home.is_loaded
        if not self._is_meant(message):
            return False
        if enters or self._meetings.takes_over or not self._home.is_loaded:
            return True
        return message.meeting > self._meetings.ended or message.load > self._home.loads

    def _is_meant(self, message: Pass) -> bool:
        """Whether it is passed on to this server as it is now: it may have gone, or entered
        again, since it was sent."""
        entering = self._entering
        if message.entry != entering.entry:
            return False
        return entering.is_under_way or self._membership.is_active

    def _take(self, received: Received, now: float) -> None:
        peer, sender, message, payload = received
        reply: Done | Standing | Manifest = Done()
        if isinstance(message, Enter):
            reply = self._enter(peer, message)
        elif isinstance(message, Tell):
            self._hear_words(peer, message, now)
        elif self._is_meant(message):
            self._take_item(peer, message, payload, now)
        elif isinstance(message.what, Away) and message.source == peer.number:
            self._passing.goes(peer)
        self._out.append(Answer(sender, reply))

    def _hear_words(self, peer: Peer, tell: Tell, now: float) -> None:
        if tell.number >= self._told.get(peer.number, 0):
            self._told[peer.number] = tell.number + 1
            self._home.hear(peer.number, tell.words, now)

    def _enter(self, peer: Peer, enter: Enter) -> Standing | Manifest:
        if enter.via == self._home.number:
            manifest = self._membership.is_taken_over(enter.entry, peer)
            self._passing.enters(peer, enter.entry, [])
            return manifest
        via = self._peers.get(enter.via)
        if via is None:
            raise UsageError(f"enter: there is no server {enter.via}")
        items = [] if via is peer else via.items()
        self._passing.enters(peer, enter.entry, items)
        mine = [item.number for item in items if line_of(item) == self._passing.line]
        first = min(mine, default=self._passing.next)
        return msgspec.structs.replace(self._membership.stands(), number=first)

    def _take_item(
        self, peer: Peer, message: Pass, payload: torch.Tensor | None, now: float
    ) -> None:
        line = message.source, message.life
        expected = self._passing.taken.next(line)
        if line == self._passing.line or message.number < expected:
            self._home.counts["parcels that came again"] += 1
            return
        if message.number > expected:
            raise UsageError(
                f"pass: expected number {expected} of server {message.source}, got "
                f"{message.number}"
            )
        source = self._peers.get(message.source)
        if isinstance(message.what, Away):
            if source is not None and source.life == message.life:
                self._passing.goes(source)
        elif message.load == self._home.loads:
            self._home.take(message.source, message.what, payload, now)
        item = Item(
            source=message.source,
            life=message.life,
            number=message.number,
            load=message.load,
            meeting=message.meeting,
            what=message.what,
            payload=payload,
        )
        self._passing.taken.take(item, peer.number, message.floor)


def _line(peer: Peer, message: Pass | Tell | Enter) -> tuple[int, object]:
    """What comes in order with it."""
    if isinstance(message, Pass):
        return message.source, message.life
    return peer.number, type(message)
