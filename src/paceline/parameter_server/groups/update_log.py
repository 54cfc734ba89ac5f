"""What group servers pass on: each item is taken once by each, in the order of its source.

A server numbers its items, one line for each of its lives. It keeps each until all active peers
have answered it, and they keep it until all have it: so if the source is lost in the middle, who
has an item passes it on to the others. Whatever way an item comes, its number says whether it
was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from paceline.interfaces.server_messages import (
    Away,
    Buffers,
    Gradients,
    Pass,
    Refused,
    Reply,
)
from paceline.parameter_server.groups.message_queue import Item, Letter, Mail, Peer

Line = tuple[int, int]
"""A source, and which of its lives."""


def line_of(item: Item | Pass) -> Line:
    return item.source, item.life


class Taken:
    """What was taken of other servers, or of earlier lives of this one."""

    def __init__(self) -> None:
        self._next: dict[Line, int] = {}
        self._kept: dict[Line, list[tuple[Item, int]]] = {}
        """What others may not have yet, each with the server that it came from."""

    def next(self, line: Line) -> int:
        """The number that is to come."""
        return self._next.get(line, 0)

    def take(self, item: Item, sender: int, floor: int) -> None:
        """An item is taken; all have what is below *floor*."""
        line = line_of(item)
        self._next[line] = item.number + 1
        kept = [*self._kept.get(line, []), (item, sender)]
        self._kept[line] = [one for one in kept if one[0].number >= floor]

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

    def restore(self, saved: Iterable[tuple[int, int, int]]) -> None:
        """Begin anew with what another server has taken."""
        self._next = {(source, life): number for source, life, number in saved}
        self._kept = {}


class Passing:
    """The items of server *number* in this *life* of it, and those that it relays.

    *refused* is told why a peer does not take an item.
    """

    def __init__(
        self,
        number: int,
        life: int,
        peers: Mapping[int, Peer],
        mail: Mail,
        refused: Callable[[Peer, str], None],
    ) -> None:
        self._number, self.life = number, life
        self._peers, self._mail, self._refused = peers, mail, refused
        self.next = 0
        self.taken = Taken()

    @property
    def line(self) -> Line:
        return self._number, self.life

    def pass_on(
        self,
        what: Gradients | Buffers | Away,
        payload: torch.Tensor | None,
        load: int,
        meeting: int,
    ) -> None:
        """One more item, for all that are active."""
        item = Item(*self.line, self.next, load, meeting, what, payload)
        self.next += 1
        for peer in self._active():
            self._post(peer, item)

    def floor(self, line: Line) -> int:
        """All active servers have what is below this number, as far as is known."""
        if line != self.line:
            return self.taken.floor(line)
        waiting = [
            item.number
            for peer in self._active()
            for item in peer.items()
            if line_of(item) == line
        ]
        return min(waiting, default=self.next)

    def longest(self) -> int:
        """The most items that a peer has not answered."""
        return max((len(peer.items()) for peer in self._active()), default=0)

    def all_answered(self) -> bool:
        return not self.longest()

    def relay(self, lost: int) -> None:
        """A server is lost, maybe before all had what it has passed on here."""
        for item in self.taken.had_from(lost):
            for peer in self._active():
                if peer.number != lost and item not in peer.items():
                    self._post(peer, item)

    def goes(self, peer: Peer) -> None:
        """Nothing is to be passed on to this peer."""
        peer.active = False
        self._mail.take_back(peer, lambda letter: letter.item is not None)

    def enters(self, peer: Peer, entry: int, items: Iterable[Item]) -> None:
        """From now on pass on to this peer, and first these."""
        self.goes(peer)
        peer.active, peer.entry, peer.told = True, entry, entry
        for item in items:
            self._post(peer, item)

    def _active(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.active]

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
            floor=min(item.number, self.floor(line_of(item))),
            load=item.load,
            meeting=item.meeting,
            entry=peer.entry,
            what=item.what,
        )

    def _answered(
        self, peer: Peer, item: Item, reply: Reply, payload: torch.Tensor | None
    ) -> None:
        if isinstance(reply, Refused):
            self._refused(peer, reply.reason)
        elif line_of(item) != self.line and not any(
            item in other.items() for other in self._active()
        ):
            self.taken.all_have(item)
