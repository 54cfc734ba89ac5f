"""Where all workers meet, and at the end, group servers come to hold the same.

Workers meet at server 0 alone. It holds back its answers, and tells the others to *drain*: they
do nothing for workers, pass on what they owe, and answer once all others have it. Then every
server has everything, in an order of its own, and all take over what server 0 has, to the bit. So
a checkpoint, a load and the end of a training are of one model, and need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from paceline.interfaces import Answer, Sender
from paceline.interfaces.server_messages import (
    Agree,
    Done,
    Drain,
    Drained,
    Manifest,
    Refused,
    Reply,
)
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.message_queue import Letter, Mail, Peer, expected
from paceline.parameter_server.groups.state_transfer import Arriving
from paceline.parameter_server.groups.update_log import Passing


class Meetings:
    """The meeting that is under way, at server 0 and at the others.

    *drain* passes on what is owed here. *capture* keeps a copy for those that take it over.
    *agree*: they do.
    """

    def __init__(
        self,
        home: Home,
        peers: Mapping[int, Peer],
        mail: Mail,
        passing: Passing,
        drain: Callable[[], object],
        capture: Callable[[int, Mapping[int, Peer]], Manifest],
        agree: bool,
    ) -> None:
        self._home, self._peers = home, peers
        self._mail, self._passing, self._out = mail, passing, mail.out
        self._drain, self._capture, self._agrees = drain, capture, agree
        self.ended = 0
        """How many have ended here."""
        self.is_still = False
        """Nothing is done for workers now."""
        self.takes_over = False
        """A copy of server 0 is under way: nothing is taken of others."""
        self._drained: dict[int, bool] = {}
        """At server 0, by server that has drained: whether its model has changed."""
        self._asked: Sender | None = None
        """Elsewhere: server 0 waits for this one."""
        self._copy: Arriving | None = None
        self._before: int | None = None
        """The progress here when the last one had ended."""

    # ---- at server 0 ----

    def look(self) -> None:
        """Whether a meeting begins, or all have drained."""
        if not self.is_still and self._home.held and self._home.number == 0:
            self._begin()
        is_here = self.is_still and self._home.number == 0
        if not is_here or len(self._drained) < len(self._peers):
            return
        if self._passing.all_answered():
            self._end()

    def _begin(self) -> None:
        self.is_still, self._drained = True, {}
        self._drain()
        for peer in self._peers.values():
            self._tell_to_drain(peer, self.ended + 1)

    def _tell_to_drain(self, peer: Peer, meeting: int) -> None:
        drain = Drain(life=self._passing.life, meeting=meeting)

        def drained(reply: Reply, payload: torch.Tensor | None) -> None:
            reply = expected(reply, Drained, peer)
            if self.is_still and meeting == self.ended + 1:
                self._drained[peer.number] = reply.changed

        self._mail.post(peer, Letter(lambda: drain, drained))

    def _end(self) -> None:
        self.ended += 1
        changed = any(self._drained.values()) or self._has_changed()
        manifest = None
        if changed and self._agrees and self._peers and self._home.is_loaded:
            manifest = self._capture(self.ended, self._peers)
        agree = Agree(meeting=self.ended, manifest=manifest)
        for peer in self._peers.values():
            then = partial(self._has_agreed, peer)
            self._mail.post(peer, Letter(lambda: agree, then))
        self._go_on()
        self._home.release()

    def _has_agreed(
        self, peer: Peer, reply: Reply, payload: torch.Tensor | None
    ) -> None:
        """Raises `UsageError` where a server does not go on: then the others do not, either."""
        expected(reply, Done, peer)

    def _has_changed(self) -> bool:
        return self._home.progress != self._before

    def _go_on(self) -> None:
        self.is_still = self.takes_over = False
        self._copy = None
        self._before = self._home.progress

    # ---- at the others ----

    def drain(self, sender: Sender) -> None:
        """Server 0 says that all meet."""
        self._asked = sender

    def answer(self) -> None:
        """Tell server 0, once that is so, that this one has drained."""
        if self._asked is None or self.takes_over:
            return
        if not self.is_still:
            self.is_still = True
            self._drain()
        if self._passing.all_answered():
            sender, self._asked = self._asked, None
            drained = Drained(changed=self._has_changed())
            self._out.append(Answer(sender, drained))

    def give_up(self, reason: str) -> None:
        """Training cannot go on: server 0 does not wait for this one."""
        if self._asked is not None:
            sender, self._asked = self._asked, None
            self._out.append(Answer(sender, Refused(reason=reason)))

    def agree(self, source: Peer, agree: Agree) -> None:
        """All have drained. Raises `UsageError` for a copy that does not fit."""
        if agree.meeting <= self.ended or self.takes_over:
            return  # it has entered since, or was told so before
        if agree.manifest is None:
            self._over(agree.meeting)
            return
        self.is_still = self.takes_over = True
        self._copy = Arriving(
            *(self._home, self._mail, source, agree.meeting),
            done=lambda manifest: self._over(agree.meeting),
            failed=lambda _: self._over(agree.meeting),
        )
        self._copy.ask(agree.manifest)

    def _over(self, meeting: int) -> None:
        self.ended = meeting
        self._go_on()

    # ---- who comes anew ----

    def lives_anew(self, peer: Peer) -> None:
        """A peer was started again. If it is server 0, it knows nothing of a meeting: that has
        ended. Another one has to drain once more."""
        if peer.number == 0:
            self._asked = None
            if self._copy is not None:
                self._copy.drop()
            if self.is_still:
                self._over(self.ended + 1)
        elif self.is_still and self._drained.pop(peer.number, None) is not None:
            self._tell_to_drain(peer, self.ended + 1)

    def has_entered(self, meeting: int) -> None:
        """This server has taken everything from one that had so many meetings."""
        self.ended = max(self.ended, meeting)
