"""A server's letters to the other group servers: each until it is answered, in order, whatever
connections do meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Ask
from paceline.interfaces.server_messages import (
    Away,
    Buffers,
    Gradients,
    Refused,
    Reply,
    Request,
)

ReplyKind = TypeVar("ReplyKind")


def expected(reply: Reply, kind: type[ReplyKind], peer: Peer) -> ReplyKind:
    """The reply, of the kind that a request to *peer* is answered with. Raises `UsageError` for
    any other one: then this server cannot go on."""
    if isinstance(reply, kind):
        return reply
    got = reply.reason if isinstance(reply, Refused) else f"got {type(reply).__name__}"
    raise UsageError(f"{peer.name}: expected {kind.__name__} as its answer: {got}")


@dataclass(eq=False, frozen=True)
class Item:
    """What server *source* has to tell to all, as number *number* of a *life* of it: see
    `Pass`."""

    source: int
    life: int
    number: int
    load: int
    meeting: int
    what: Gradients | Buffers | Away
    payload: torch.Tensor | None


@dataclass(eq=False)
class Letter:
    """A request that is to be answered. *make* writes it, each time that it is sent; *then* is
    called with the answer, and raises `UsageError` where this server cannot go on after it.
    *item*: what it passes on."""

    make: Callable[[], Request]
    then: Callable[[Reply, torch.Tensor | None], None]
    payload: torch.Tensor | None = None
    into: torch.Tensor | None = None
    item: Item | None = None


@dataclass(eq=False)
class Peer:
    """Another server, as far as is known here.

    *active*: items are passed on to it. *entry*: how it has last entered, or gone; *told*: the
    same, as it has said when it entered. *lost*: why nobody answers there, since when; None
    while it is connected.
    """

    number: int
    name: str
    life: int | None = None
    entry: int = 0
    told: int = -1
    active: bool = True
    lost: tuple[str, float] | None = None
    letters: list[Letter] = field(default_factory=list)
    """Those that are unanswered, the oldest first."""
    under_way: dict[int, Letter] = field(default_factory=dict)

    def stands(self, life: int, entry: int, active: bool) -> None:
        """What it has answered; it may have said more since, or be about to."""
        if entry > self.told:
            self.life, self.entry, self.active = life, entry, active

    def items(self) -> list[Item]:
        """What it has not answered yet."""
        return [letter.item for letter in self.letters if letter.item is not None]


class Mail:
    """The letters to *peers*; *out* is where requests leave."""

    def __init__(self, peers: Mapping[int, Peer], out: list[Answer | Ask]) -> None:
        self._peers, self.out = peers, out
        self._by_name = {peer.name: peer for peer in peers.values()}
        self._numbers = itertools.count()

    def named(self, name: str) -> Peer:
        return self._by_name[name]

    def post(self, peer: Peer, letter: Letter) -> None:
        """Send a letter now, or when the peer is back."""
        peer.letters.append(letter)
        if peer.lost is None:
            self._send(peer, letter)

    def _send(self, peer: Peer, letter: Letter) -> None:
        number = next(self._numbers)
        peer.under_way[number] = letter
        ask = Ask(peer.name, number, letter.make(), letter.payload, letter.into)
        self.out.append(ask)

    def replied(
        self, peer: Peer, number: int, reply: Reply, payload: torch.Tensor | None
    ) -> None:
        """A peer has answered; not to a letter that was taken back. Raises `UsageError` where
        this server cannot go on after that."""
        letter = peer.under_way.pop(number, None)
        if letter is not None:
            peer.letters.remove(letter)
            letter.then(reply, payload)

    def lost(self, peer: Peer, reason: str, now: float) -> None:
        """What was under way is not answered any more."""
        peer.under_way.clear()
        if peer.lost is None:
            peer.lost = reason, now

    def back(self, peer: Peer) -> None:
        """It is there again: send what it has not answered."""
        peer.lost = None
        for letter in peer.letters:
            self._send(peer, letter)

    def take_back(self, peer: Peer, which: Callable[[Letter], bool]) -> None:
        """These letters are not meant any more, nor the answers to them."""
        gone = {letter for letter in peer.letters if which(letter)}
        peer.letters = [letter for letter in peer.letters if letter not in gone]
        for number in [n for n, one in peer.under_way.items() if one in gone]:
            del peer.under_way[number]
