"""Server 0 as the root: it passes on to each other server what all but that one have applied.

The others pass on to it alone. It applies what comes, and keeps it, with what its own workers
have sent, until it is passed on: when all have come that are in the mesh, or one for the second
time. So with G servers of equal speed an exchange is 2 (G - 1) parcels, where it is G (G - 1)
in a mesh; and the fastest group says how often there is one.

Exactly once, whoever dies
--------------------------
What goes out has one number for all receivers, and says which items of others it *covers*. So each server
knows of every item whether it has it, whatever way that came: a root that was started again takes
everything from one of the others, and is passed on what that one has not.

The root answers an item once all have it (`answers`): until then the one that it came from keeps it.
So nothing is lost with the root but what its own workers have sent. Some servers may have had
more of that than others: they all take over what the new root has (see `consistent_cut`), and it
passes on nothing before but to the one that it had everything from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.interfaces import Answer, GradientSum, Parcel, Sender
from paceline.interfaces.group_messages import Gradients, Nothing
from paceline.interfaces.server_messages import Done
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.update_log import Covers, Passing, What

Number = tuple[int, int, int]
"""An item's source, life and number."""
OFTEN_ENOUGH = 2
"""So many parcels of one source, and all that there is of its bucket is passed on."""


class Root:
    """What server 0, whose machine is *home*, is to pass on by *passing*."""

    def __init__(self, home: Home, passing: Passing) -> None:
        self._home, self._passing = home, passing
        self._parcels: dict[int, list[tuple[int, Parcel]]] = {}
        """By bucket: what was not passed on yet, with the server that has applied it."""
        self._came: dict[int | None, list[Number]] = {}
        """By bucket: the items that the next one of it covers; of None: any next one."""
        self._unanswered: dict[Number, Sender] = {}
        self._covered: dict[Number, int] = {}
        """In which number of this server's those of them are, once they were passed on."""
        self._hurries = False
        """A server wants to go: it is to have all answers."""

    @property
    def is_one(self) -> bool:
        return self._home.number == 0 and self._home.has_root

    # ---- what comes ----

    def add(self, source: int, parcel: Parcel) -> None:
        """Server *source* has applied this; it was applied here."""
        self._parcels.setdefault(parcel.bucket, []).append((source, parcel))

    def has_come(self, item: Number, sender: Sender, bucket: int | None) -> None:
        """An item was taken, and is answered later. *bucket*: of which it has a parcel."""
        self._came.setdefault(bucket, []).append(item)
        self._unanswered[item] = sender

    def came_again(self, item: Number, sender: Sender) -> bool:
        """Whether it is yet to be answered."""
        waits = item in self._unanswered
        if waits:
            self._unanswered[item] = sender
        return waits

    def hurry(self) -> None:
        self._hurries = True

    def answers(self) -> list[Answer]:
        """To items that all have by now."""
        all_have = self._passing.floor(self._passing.line)
        done = [item for item, number in self._covered.items() if number < all_have]
        for item in done:
            del self._covered[item]
        return [Answer(self._unanswered.pop(item), Done()) for item in done]

    # ---- what goes out ----

    def pass_on(self, everything: bool, meetings: int) -> list[int]:
        """What is due by now, or *everything*; returns the buckets of it."""
        everything = everything or self._hurries
        due = [b for b in self._parcels if everything or self._is_due(b)]
        for bucket in due:
            self._pass_on(bucket, self._parcels.pop(bucket), meetings)
        if everything and self._came:
            self._number(None, {}, meetings)
        self._hurries = False
        return due

    def _is_due(self, bucket: int) -> bool:
        sources = [source for source, _ in self._parcels[bucket]]
        expected = {peer.number for peer in self._passing.active()}
        if self._home.has_workers():
            expected.add(0)
        often = max(map(sources.count, sources)) >= OFTEN_ENOUGH
        return often or expected.issubset(sources)

    def _pass_on(
        self, bucket: int, parcels: list[tuple[int, Parcel]], meetings: int
    ) -> None:
        parts = {}
        for peer in self._passing.active():
            its = [parcel for source, parcel in parcels if source != peer.number]
            if its:
                whole = self._added(its)
                values = self._home.standing(bucket, whole.values)
                parts[peer.number] = described(whole), values
        self._number(bucket, parts, meetings)

    def _number(
        self,
        bucket: int | None,
        parts: dict[int, tuple[Gradients, torch.Tensor]],
        meetings: int,
    ) -> None:
        items = [*self._came.pop(bucket, []), *self._came.pop(None, [])]

        def form(peer: int) -> tuple[What, torch.Tensor | None, Covers]:
            what, payload = parts.get(peer, (Nothing(), None))
            return what, payload, [item for item in items if item[0] != peer]

        loads = self._home.loads
        number = self._passing.pass_on_each(form, loads, meetings)
        self._covered.update(dict.fromkeys(items, number))

    def _added(self, parcels: list[Parcel]) -> Parcel:
        """One parcel with all that is in these."""
        first, *others = parcels
        if not others:
            return first
        shard, bucket = self._home.shard, first.bucket
        total = GradientSum(
            first.values.clone(), first.weight, first.used, first.hyperparameters
        )
        for parcel in others:
            its = parcel.values, parcel.weight, parcel.used, parcel.hyperparameters
            total.add(shard, bucket, *its)
        return parcels[-1]._replace(
            gradients=sum(parcel.gradients for parcel in parcels),
            weight=total.weight,
            used=total.used,
            hyperparameters=total.hyperparameters,
            values=total.mean(),
            steps=latest([parcel.steps for parcel in parcels]),
        )


def latest(steps: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """By worker the last of its steps in these."""
    found: dict[int, int] = {}
    for its in steps:
        for worker, step in its.items():
            found[worker] = max(step, found.get(worker, 0))
    return found


def described(parcel: Parcel) -> Gradients:
    """Its header."""
    return Gradients(
        bucket=parcel.bucket,
        gradients=parcel.gradients,
        weight=parcel.weight,
        used=list(parcel.used),
        hyperparameters=[dict(h) for h in parcel.hyperparameters],
        steps=dict(parcel.steps),
    )
