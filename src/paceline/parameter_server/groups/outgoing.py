"""What a group server tells all others: what it applies, its buffers, and its discipline's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.interfaces import Parcel
from paceline.interfaces.server_messages import (
    Away,
    Buffers,
    Gradients,
    Refused,
    Reply,
    Tell,
    Trains,
)
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.message_queue import Letter, Mail, Peer
from paceline.parameter_server.groups.update_log import Passing

ROUNDS_UNANSWERED = 4
"""A peer may owe answers to so many parcels of each bucket. Then no more are made: what would be
in them is in the next ones."""


class Telling:
    """What *home* wants passed on, to *peers*. *mistaken* is told where they train something
    else."""

    def __init__(
        self,
        home: Home,
        peers: Mapping[int, Peer],
        mail: Mail,
        passing: Passing,
        mistaken: Callable[[str], None],
    ) -> None:
        self._home, self._peers = home, peers
        self._mail, self._passing = mail, passing
        self._number, self._words = 0, b""
        """How often the discipline has told something, and what it was last."""
        self._mistaken = mistaken
        self._trains: Trains | None = None
        """What is trained here, once the others were told."""

    def introduce(self) -> None:
        """What is trained here, as soon as that is known."""
        if self._trains is None and self._home.meshed is not None:
            self._trains = Trains(what=self._home.in_words())
            for peer in self._peers.values():
                self._introduce(peer, self._trains)

    def _introduce(self, peer: Peer, trains: Trains) -> None:
        def answered(reply: Reply, payload: torch.Tensor | None) -> None:
            if isinstance(reply, Refused):
                self._mistaken(reply.reason)

        self._mail.post(peer, Letter(lambda: trains, answered))

    def tell(self, meetings: int, now: float) -> bool:
        """Whether there was something by now; *meetings*: how many have ended."""
        said = self._say(self._home.words(now))
        most = ROUNDS_UNANSWERED * (1 + len(self._home.shard.buckets))
        if self._passing.longest() >= most:
            return said
        return self.pass_on(False, meetings, now) or said

    def pass_on(self, everything: bool, meetings: int, now: float) -> bool:
        """What is to be passed on by now, or *everything* that was not yet; returns whether
        there were parcels."""
        home = self._home
        parcels = home.outgoing(everything, now)
        for parcel in parcels:
            values = home.standing(parcel.bucket, parcel.values)
            self._pass(_described(parcel), values, meetings)
        if everything or any(home.is_last_bucket(p.bucket) for p in parcels):
            buffers = home.buffers_to_pass()
            if buffers is not None:
                self._pass(*buffers, meetings)
        return bool(parcels)

    def go(self, meetings: int) -> None:
        """Nothing is to be passed on to this server any more."""
        self._pass(Away(), None, meetings)

    def tell_again(self, peer: Peer) -> None:
        """A peer was started again: it is told what is trained, and the last words."""
        if self._trains is not None:
            self._introduce(peer, self._trains)
        if self._words:
            self._tell(peer)

    def _pass(
        self,
        what: Gradients | Buffers | Away,
        payload: torch.Tensor | None,
        meetings: int,
    ) -> None:
        self._passing.pass_on(what, payload, self._home.loads, meetings)

    def _say(self, words: bytes) -> bool:
        if not words:
            return False
        self._number, self._words = self._number + 1, words
        for peer in self._peers.values():
            self._tell(peer)
        return True

    def _tell(self, peer: Peer) -> None:
        life, number = self._passing.life, self._number
        tell = Tell(life=life, number=number, words=self._words)
        self._mail.post(peer, Letter(lambda: tell, lambda *_: None))


def _described(parcel: Parcel) -> Gradients:
    return Gradients(
        bucket=parcel.bucket,
        gradients=parcel.gradients,
        weight=parcel.weight,
        used=list(parcel.used),
        hyperparameters=[dict(h) for h in parcel.hyperparameters],
        steps=dict(parcel.steps),
    )
