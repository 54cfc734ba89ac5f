"""What group servers pass on: each item is taken once by each, in the order of its source.

A server numbers its items, one line for each of its lives. It keeps each until all active peers
have answered it, and they keep it until all have it: so if the source is lost in the middle, who
has an item passes it on to the others. Whatever way an item comes, its number says whether it
was taken.

Where server 0 is the root (`root_topology`) the others pass on to it alone, and it answers an item
once all have that: so each keeps what others may not have, and nobody relays. If server 0 is lost
these items wait, and go to the one that is started in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from paceline.interfaces.group_messages import Away, Buffers, Gradients, Nothing, Pass
from paceline.interfaces.server_messages import Refused, Reply
from paceline.parameter_server.groups.message_queue import Item, Letter, Mail, Peer

Line = tuple[int, int]
"""A source, and which of its lives."""
What = Gradients | Buffers | Away | Nothing
Covers = list[tuple[int, int, int]]


def line_of(item: Item | Pass) -> Line:
    return item.source, item.life


class Taken:
    """What was taken of other servers, or of earlier lives of this one."""

    def __init__(self) -> None:
        self._next: dict[Line, int] = {}
        self._ahead: set[tuple[int, int, int]] = set()
        """Items after those that are in all the same, by source, life and number: another
        server's had them in it."""
        self._kept: dict[Line, list[tuple[Item, int]]] = {}
        """What others may not have yet, each with the server that it came from."""

    def next(self, line: Line) -> int:
        """The number that is to come."""
        return self._next.get(line, 0)

    def has(self, line: Line, number: int) -> bool:
        return number < self.next(line) or (*line, number) in self._ahead

    def take(self, item: Item, sender: int, floor: int) -> None:
        """An item is taken; all have what is below *floor*."""
        line = line_of(item)
        self._next[line] = item.number + 1
        self._catch_up(line)
        kept = [*self._kept.get(line, []), (item, sender)]
        self._kept[line] = [one for one in kept if one[0].number >= floor]

    def cover(self, items: Iterable[tuple[int, int, int]]) -> None:
        """These came with the item of another server."""
        for source, life, number in items:
            if not self.has((source, life), number):
                self._ahead.add((source, life, number))
                self._catch_up((source, life))

    def _catch_up(self, line: Line) -> None:
        while (*line, self.next(line)) in self._ahead:
            self._ahead.discard((*line, self.next(line)))
            self._next[line] = self.next(line) + 1

    def skip(self, line: Line, number: int) -> None:
        """What is before this number does not come any more."""
        self._next[line] = max(number, self.next(line))

    def floor(self, line: Line) -> int:
        """All have what is below this number."""
        kept = self._kept.get(line)
        return kept[0][0].number if kept else self.next(line)

    def had_from(self, server: int) -> list[Item]:
        """What came from a server, or is its own, and others may not have: line by line."""
        return [
            item
            for kept in self._kept.values()
            for item, sender in kept
            if server in (sender, item.source)
        ]

    def all_have(self, item: Item) -> None:
        """It need not be kept."""
        line = line_of(item)
        kept = self._kept.get(line, [])
        self._kept[line] = [one for one in kept if one[0] is not item]

    def saved(self) -> list[tuple[int, int, int]]:
        return [(*line, number) for line, number in self._next.items()]

    def saved_ahead(self) -> list[tuple[int, int, int]]:
        return sorted(self._ahead)

    def restore(
        self,
        saved: Iterable[tuple[int, int, int]],
        ahead: Iterable[tuple[int, int, int]],
    ) -> None:
        """Begin anew with what another server has taken."""
        self._next = {(source, life): number for source, life, number in saved}
        self._ahead = set(ahead)
        self._kept = {}


class Passing:
    """The items of server *number* in this *life* of it, and those that it relays.

    *refused* is told why a peer does not take an item. *has_root*: whether server 0 is the root,
    as soon as something is loaded.
    """

    def __init__(
        self,
        number: int,
        life: int,
        peers: Mapping[int, Peer],
        mail: Mail,
        refused: Callable[[Peer, str], None],
        has_root: Callable[[], bool] = lambda: False,
    ) -> None:
        self._number, self.life = number, life
        self._peers, self._mail, self._refused = peers, mail, refused
        self._has_root = has_root
        self.next = 0
        self.taken = Taken()
        self._unsent: list[Item] = []
        """For the root, which was lost, and is not there again."""

    @property
    def line(self) -> Line:
        return self._number, self.life

    def pass_on(
        self,
        what: What,
        payload: torch.Tensor | None,
        load: int,
        meeting: int,
    ) -> None:
        """One more item, for all that are active; for the root alone, where there is one."""
        item = Item(*self.line, self.next, load, meeting, what, payload)
        self.next += 1
        for peer in self.active():
            self._post(peer, item)
        if self._passes_to_root and not self._peers[0].active:
            self._unsent.append(item)

    def pass_on_each(
        self,
        make: Callable[[int], tuple[What, torch.Tensor | None, Covers]],
        load: int,
        meeting: int,
    ) -> int:
        """As the root: one more item, of which each that is active has its own form. Returns
        its number."""
        number, self.next = self.next, self.next + 1
        for peer in self.active():
            what, payload, covers = make(peer.number)
            item = Item(*self.line, number, load, meeting, what, payload, covers)
            self._post(peer, item)
        return number

    @property
    def _passes_to_root(self) -> bool:
        return bool(self._number) and self._has_root()

    def floor(self, line: Line) -> int:
        """All active servers have what is below this number, as far as is known."""
        if line != self.line:
            return self.taken.floor(line)
        waiting = [
            item.number
            for peer in self.active()
            for item in peer.items()
            if line_of(item) == line
        ]
        return min(waiting, default=self.next)

    def longest(self) -> int:
        """The most items that a peer has not answered."""
        longest = max((len(peer.items()) for peer in self.active()), default=0)
        return longest + len(self._unsent)

    def all_answered(self) -> bool:
        return not self.longest()

    def relay(self, lost: int) -> None:
        """A server is lost, maybe before all had what it has passed on here."""
        if self._has_root():
            return
        for item in self.taken.had_from(lost):
            for peer in self.active():
                if peer.number != lost and item not in peer.items():
                    self._post(peer, item)

    def goes(self, peer: Peer) -> None:
        """Nothing is to be passed on to this peer; what it has not answered waits, if it is
        the root."""
        if self._passes_to_root and not peer.number:
            self._unsent += peer.items()
        peer.active = False
        self._mail.take_back(peer, lambda letter: letter.item is not None)

    def enters(self, peer: Peer, entry: int, items: Iterable[Item]) -> None:
        """From now on pass on to this peer, and first these."""
        self.goes(peer)
        peer.active, peer.entry, peer.told = True, entry, entry
        peer.behind = False
        for item in items:
            self._post(peer, item)

    def for_one_that_copies(self, peer: Peer, via: Peer) -> list[Item]:
        """What *peer* is to be passed on first, that takes everything from *via*."""
        if not self._has_root():
            return via.items()
        return [] if peer.number else self._all_unsent(peer)

    def has_what_is_here(self, peer: Peer) -> None:
        """A peer has taken everything from this server."""
        if not peer.number:
            self._unsent.clear()

    def _all_unsent(self, root: Peer) -> list[Item]:
        unsent, self._unsent = [*self._unsent, *root.items()], []
        self._mail.take_back(root, lambda letter: letter.item is not None)
        return unsent

    def active(self) -> list[Peer]:
        """Whom to pass on to."""
        active = [p for p in self._peers.values() if p.active and not p.behind]
        if self._passes_to_root:
            return [peer for peer in active if not peer.number]
        return active

    def _post(self, peer: Peer, item: Item) -> None:
        letter = Letter(
            partial(self._write, peer, item),
            partial(self._answered, peer, item),
            item.payload,
            item=item,
        )
        self._mail.post(peer, letter)

    def _write(self, peer: Peer, item: Item) -> Pass:
        return Pass(
            source=item.source,
            life=item.life,
            number=item.number,
            floor=item.number + 1
            if self._has_root()
            else min(item.number, self.floor(line_of(item))),
            load=item.load,
            meeting=item.meeting,
            entry=peer.entry,
            what=item.what,
            covers=list(item.covers),
        )

    def _answered(
        self, peer: Peer, item: Item, reply: Reply, payload: torch.Tensor | None
    ) -> None:
        if isinstance(reply, Refused):
            self._refused(peer, reply.reason)
        elif line_of(item) != self.line and not any(
            item in other.items() for other in self.active()
        ):
            self.taken.all_have(item)
