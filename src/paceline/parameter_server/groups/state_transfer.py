"""Everything that a group server has, on its way to another one: taken at one moment, sent part
by part, and put in all at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    DTYPES,
    Copied,
    Copy,
    Join,
    Manifest,
    Refused,
    Reply,
)
from paceline.parameter_server.client.optimizer_state import MOST_STATES
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.message_queue import Letter, Mail, Peer, expected
from paceline.parameter_server.groups.update_log import Passing
from paceline.parameter_server.state_machine.checks import difference, in_words
from paceline.parameter_server.state_machine.store import State
from paceline.transport.payloads import described
from paceline.transport.protocol import LARGEST_PAYLOAD_BYTES

HAS_ALL = -1
"""In place of a part: the copy was taken, and need not be kept."""
Part = tuple[torch.Tensor, list[list[tuple[str, int | float]]]]
"""A payload, and what it means where it is an optimizer's state."""


class Captured:
    """What a server that holds parameters has, as of now; *key* names it."""

    def __init__(
        self, key: int, home: Home, passing: Passing, meeting: int, active: bool
    ) -> None:
        self.key = key
        shard, rest = home.shard, home.rest
        self._parts: list[Part] = []
        for bucket in shard.buckets:
            self._parts.append(
                (home.standing(bucket, shard.store.parameters(bucket)), [])
            )
            entries, payload = shard.store.state(bucket)
            self._parts.append((home.standing(bucket, payload), entries))
        buffers = rest.buffers
        if buffers is None:
            buffers = torch.empty(0, dtype=torch.float64)
        self._parts += [(rest.bytes, []), (buffers, [])]
        step = home.ended()
        self.manifest = Manifest(
            active=active,
            join=home.saved().numpy().tobytes(),
            step=shard.slowest() if step is None else step,
            loads=home.loads,
            gradients=home.gradients,
            meeting=meeting,
            versions=list(shard.store.versions),
            taken=[*passing.taken.saved(), (*passing.line, passing.next)],
            parts=[_described(payload) for payload, _ in self._parts],
            floats=home.floats,
            applied={w: dict(mine) for w, mine in shard.store.applied.items()},
        )

    def part(self, number: int) -> Part:
        """Raises `UsageError` for one that there is not."""
        if not 0 <= number < len(self._parts):
            raise UsageError(f"copy: part {number} of {len(self._parts)}")
        return self._parts[number]


def _described(payload: torch.Tensor) -> tuple[str, int]:
    dtype, elements = described(payload)
    assert dtype is not None
    return dtype, elements


class Arriving:
    """A copy of what *peer* has, under way: *done* is called once it was put in, *failed* with
    the reason where the peer has it no more."""

    def __init__(
        self,
        home: Home,
        mail: Mail,
        peer: Peer,
        key: int,
        done: Callable[[Manifest], None],
        failed: Callable[[str], None],
    ) -> None:
        self._home, self._mail = home, mail
        self._peer, self._key = peer, key
        self._done, self._failed = done, failed
        self._payloads: dict[int, torch.Tensor | None] = {}
        self._states: dict[int, list[State]] = {}
        self._letters: set[Letter] = set()

    def drop(self) -> None:
        """It is not wanted any more."""
        self._mail.take_back(self._peer, self._letters.__contains__)

    def ask(self, manifest: Manifest) -> None:
        """Ask for all parts. Raises `UsageError` where they are not of what is trained here."""
        home = self._home
        if not home.shard.is_held:
            home.hold(_as_bytes(manifest.join), manifest.step)
        _check(home, manifest)
        for number, (dtype, elements) in enumerate(manifest.parts):
            into = torch.empty(elements, dtype=DTYPES[dtype]) if elements else None
            bucket, _ = divmod(number, 2)
            if into is not None and bucket < len(home.shard.buckets):
                into = home.standing(home.shard.buckets[bucket], into)
            letter = Letter(
                partial(Copy, key=self._key, part=number),
                partial(self._arrived, manifest, number),
                into=into,
            )
            self._letters.add(letter)
            self._mail.post(self._peer, letter)

    def _arrived(
        self,
        manifest: Manifest,
        number: int,
        reply: Reply,
        payload: torch.Tensor | None,
    ) -> None:
        if isinstance(reply, Refused):
            self.drop()
            self._failed(reply.reason)
            return
        reply = expected(reply, Copied, self._peer)
        store, buckets = self._home.shard.store, self._home.shard.buckets
        bucket, is_state = divmod(number, 2)
        if bucket < len(buckets) and is_state:
            entries = reply.entries
            self._states[bucket] = store.fitting_state(
                buckets[bucket], entries, payload
            )
        self._payloads[number] = payload
        if len(self._payloads) == len(manifest.parts):
            self._put(manifest)
            has_all = Copy(key=self._key, part=HAS_ALL)
            self._mail.post(self._peer, Letter(lambda: has_all, lambda *_: None))
            self._done(manifest)

    def _put(self, manifest: Manifest) -> None:
        """All is here."""
        home = self._home
        shard, store = home.shard, home.shard.store
        for place, bucket in enumerate(shard.buckets):
            parameters = self._payloads[2 * place]
            assert parameters is not None
            store.load(bucket, parameters)
            store.put_state(bucket, self._states[place])
            ours, theirs = store.versions[bucket], manifest.versions[bucket]
            store.versions[bucket] = max(ours, theirs)
        rest, buffers = [self._payloads[2 * len(shard.buckets) + i] for i in (0, 1)]
        if rest is None:
            rest = torch.empty(0, dtype=torch.uint8)
        home.gradients = manifest.gradients
        home.has_rest(rest, buffers, manifest.floats)
        if manifest.loads > home.loads:
            home.renew(manifest.step, manifest.loads)
        home.has_applied(manifest.applied)
        home.let_go()


def _as_bytes(join: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(join), dtype=torch.uint8)


def _check(home: Home, manifest: Manifest) -> None:
    """Raise `UsageError` unless a copy fits what is held here."""
    theirs = in_words(msgspec.msgpack.decode(manifest.join, type=Join))
    if what := difference(home.in_words(), theirs):
        raise UsageError(
            f"group servers train different things: {what} is {home.in_words()[what]} here and "
            f"{theirs[what]} there; start all of them with the same options, for the same "
            "job, and remove snapshots of others"
        )
    store, expected = home.shard.store, []
    for bucket in home.shard.buckets:
        dtype, elements = _described(store.flats[bucket])
        expected += [(dtype, elements, elements), (dtype, 0, MOST_STATES * elements)]
    expected += [("uint8", 0, LARGEST_PAYLOAD_BYTES)]
    expected += [("float64", 0, LARGEST_PAYLOAD_BYTES // 8)]
    fits = len(manifest.parts) == len(expected) and all(
        dtype == its and least <= elements <= most
        for (dtype, elements), (its, least, most) in zip(
            manifest.parts, expected, strict=True
        )
    )
    if not fits or len(manifest.versions) != len(store.versions):
        raise UsageError(
            f"copy: parts {manifest.parts} do not fit what is trained here: {expected}"
        )
