"""What ranks' ends of a sum have in common that several aggregators and workers form: how they
find each other, and what they do between sums.

Workers find each other by an `Exchange`, a collective that somebody else brings. Whoever finds a
fault says so there, so that all raise, and nobody waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from paceline.collectives.in_network.ends import StreamEnd
from paceline.errors import PeerLostError, UsageError

Address = tuple[str, int]
Served = TypeVar("Served")
SERVE_SECONDS = 1.0
Exchange = Callable[[bytes], Sequence[bytes]]
"""Collective: every rank's words, in rank order, for this one's. Raises what the transport
raises."""


class Card(msgspec.Struct):
    """What a rank tells the others: values in a datagram, once they are known; or a *fault*,
    for which it cannot take part, and whether somebody is *lost*."""

    elements: int = 0
    fault: str = ""
    lost: bool = False


Of = TypeVar("Of", bound=Card)
EndOf = TypeVar("EndOf", bound=StreamEnd)


class JobEnd(Generic[Of, EndOf]):
    """One rank's end; its stream's is `_end`, once that is open. *kind*: of its cards."""

    def __init__(self, kind: type[Of]) -> None:
        self._kind = kind
        self._end: EndOf | None = None

    # ---- how all find each other ----

    def _try(self, work: Callable[[], Of]) -> Of:
        """The card that *work* makes, or one that tells why it cannot."""
        try:
            return work()
        except (UsageError, PeerLostError, OSError) as error:
            lost = not isinstance(error, UsageError)
            return self._kind(fault=str(error) or type(error).__name__, lost=lost)

    def _tell(self, exchange: Exchange, card: Of) -> list[Of]:
        """Every rank's card. Raises what any of them tells."""
        said = exchange(msgspec.json.encode(card))
        cards = [msgspec.json.decode(words, type=self._kind) for words in said]
        for other in cards:
            if other.fault:
                raise (PeerLostError if other.lost else UsageError)(other.fault)
        sizes = {other.elements for other in cards if other.elements}
        if len(sizes) > 1:
            raise UsageError(
                f"datagrams of {sorted(sizes)} values: expected one MTU on all workers"
            )
        return cards

    # ---- between sums ----

    @property
    def watch(self) -> Callable[[], None] | None:
        """See `StreamEnd.watch`."""
        return None if self._end is None else self._end.watch

    @watch.setter
    def watch(self, watch: Callable[[], None] | None) -> None:
        assert self._end is not None
        self._end.watch = watch

    def idle(self, seconds: float, wake: int) -> None:
        """Between sums: answer what still comes, for so long, or until *wake* can be read. Raises
        `PeerLostError` where an aggregator or a worker is lost."""
        assert self._end is not None
        self._end.idle(seconds, wake)

    def serve_while(self, work: Callable[[], Served]) -> Served:
        """Do *work*, which waits for other ranks, and answer what still comes meanwhile: who
        has all sums may still have to acknowledge what others need."""
        done, wake = os.pipe()
        results: list[Served] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            os.write(wake, b".")

        thread = threading.Thread(target=run, name="paceline meets", daemon=True)
        thread.start()
        try:
            with contextlib.suppress(PeerLostError):  # who is in need finds out, too
                while thread.is_alive():
                    self.idle(SERVE_SECONDS, done)
        finally:
            thread.join()
            os.close(done)
            os.close(wake)
        if errors:
            raise errors[0]
        return results[0]


def towards(address: Address) -> tuple[socket.AddressFamily, str]:
    """The family of *address*, and this machine's own one on the way there."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing: only finds the way
        return socket.AddressFamily(found[0]), str(probe.getsockname()[0])


def numeric(address: Address) -> Address:
    """The same in numbers, as others are told it. Raises `OSError` for what is not found."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][4]
    return str(found[0]), int(found[1])
