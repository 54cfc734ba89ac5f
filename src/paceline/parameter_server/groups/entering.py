"""How a group server comes into the mesh: it takes everything from one that is in it.

1. It asks all others where they stand, and takes the lowest that is active; where nobody is, the
   one that has most, which may be itself.
2. It asks the others to pass on to it from now on, and before that what that one has not
   answered yet.
3. Then it asks that one for a copy: whatever anybody has passed on is in the copy, or is on its
   way here. What comes meanwhile waits, and is dropped where it is in the copy.

If another server is started again meanwhile, all of it begins anew, with another number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    Enter,
    Manifest,
    Refused,
    Reply,
    Stand,
    Standing,
)
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.message_queue import Letter, Mail, Peer, expected
from paceline.parameter_server.groups.state_transfer import Arriving
from paceline.parameter_server.groups.update_log import Passing

ENTRIES_A_LIFE = 1 << 20


class Entering:
    """The way of server *number* into the mesh. *entered* is called with the number of meetings
    that the others had by then; *mistaken* where the servers do not fit together."""

    def __init__(
        self,
        number: int,
        home: Home,
        peers: Mapping[int, Peer],
        mail: Mail,
        passing: Passing,
        entered: Callable[[int], None],
        mistaken: Callable[[str], None],
    ) -> None:
        self._number, self._home = number, home
        self._peers, self._mail, self._passing = peers, mail, passing
        self._entered, self._mistaken = entered, mistaken
        self.entry = 0
        """How it has last entered, or gone."""
        self.is_under_way = False
        self._entries = 0
        self._letters: set[Letter] = set()
        self._standings: dict[int, Standing] = {}
        self._first: dict[int, Standing] = {}
        """Of those that pass on to this one: with which number they begin."""
        self._via: int | None = None
        self._copy: Arriving | None = None

    def begin(self) -> None:
        """Ask all where they stand; from the start, if it was under way."""
        for peer in self._peers.values():
            self._mail.take_back(peer, self._letters.__contains__)
        if self._copy is not None:
            self._copy.drop()
        self._number_anew()
        self.is_under_way = True
        self._letters, self._copy, self._via = set(), None, None
        self._standings, self._first = {}, {}
        for peer in self._peers.values():
            self._post(peer, Stand(life=self._passing.life), self._stands)

    def has_gone(self) -> None:
        """This server is away: what was sent to it before means nothing."""
        self._number_anew()

    def _number_anew(self) -> None:
        self._entries += 1
        self.entry = self._passing.life * ENTRIES_A_LIFE + self._entries

    def lives_anew(self, peer: Peer) -> None:
        """A peer was started again: what it has said is not worth anything."""
        if self.is_under_way and peer.number in self._standings:
            self.begin()

    def _post(
        self,
        peer: Peer,
        message: Stand | Enter,
        then: Callable[[Peer, Reply], None],
    ) -> None:
        def replied(reply: Reply, payload: torch.Tensor | None) -> None:
            if isinstance(reply, Refused):
                self._mistaken(f"{peer.name}: {reply.reason}")
            else:
                then(peer, reply)

        letter = Letter(lambda: message, replied)
        self._letters.add(letter)
        self._mail.post(peer, letter)

    # ---- 1. whom to take everything from ----

    def _stands(self, peer: Peer, reply: Reply) -> None:
        reply = expected(reply, Standing, peer)
        self._standings[peer.number] = reply
        peer.stands(reply.life, reply.entry, reply.active)
        if len(self._standings) < len(self._peers):
            return
        had = {n: (s.active, s.progress) for n, s in self._standings.items()}
        had[self._number] = (False, self._home.progress)
        # Of those that are active, the lowest that has a model.
        key = {n: (a, p if not a else min(p, 0), -n) for n, (a, p) in had.items()}
        self._via = max(key, key=lambda number: key[number])
        for peer in self._peers.values():
            if peer.number != self._via:
                self._post(peer, self._entry(), self._passes_on)
        self._ask_via()

    def _entry(self) -> Enter:
        assert self._via is not None
        return Enter(life=self._passing.life, entry=self.entry, via=self._via)

    # ---- 2. what is passed on from now on ----

    def _passes_on(self, peer: Peer, reply: Reply) -> None:
        reply = expected(reply, Standing, peer)
        self._first[peer.number] = reply
        peer.stands(reply.life, reply.entry, reply.active)
        self._ask_via()

    # ---- 3. the copy ----

    def _ask_via(self) -> None:
        """Once all others pass on to this one."""
        if self._first.keys() | {self._via} != self._peers.keys() | {self._via}:
            return
        if self._via == self._number:
            self._has_all(0)
        else:
            assert self._via is not None
            self._post(self._peers[self._via], self._entry(), self._take_copy)

    def _take_copy(self, via: Peer, reply: Reply) -> None:
        reply = expected(reply, Manifest, via)
        if self._standings[via.number].active and not reply.active:
            self.begin()  # it has gone meanwhile: others have what it has not
            return
        if not reply.join:  # nothing was loaded there yet
            self._has_copy(reply)
            return
        self._copy = Arriving(
            *(self._home, self._mail, via, self.entry),
            done=self._has_copy,
            failed=lambda _: self.begin(),
        )
        try:
            self._copy.ask(reply)
        except UsageError as error:
            self._mistaken(str(error))

    def _has_copy(self, manifest: Manifest) -> None:
        self._passing.taken.restore(manifest.taken)
        self._has_all(manifest.meeting)

    def _has_all(self, meeting: int) -> None:
        via = self._standings.get(-1 if self._via is None else self._via)
        if via is None or not via.active:
            # Nobody was: what the others have passed on before is nowhere any more.
            for number, first in self._first.items():
                self._passing.taken.skip((number, first.life), first.number)
        self.is_under_way, self._copy = False, None
        # Some may have ended a meeting that an earlier server 0 was lost in.
        self._entered(max([meeting, *(s.meeting for s in self._standings.values())]))
