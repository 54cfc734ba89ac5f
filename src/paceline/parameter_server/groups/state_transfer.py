"""Copies the whole state of a group server to another one.

The state is captured at one instant, sent in parts, and adopted at once. `StateSnapshot` is the
sender's half, `StateTransfer` the receiver's.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    DTYPES,
    GetState,
    Join,
    Manifest,
    Rejected,
    ReplyMessage,
    StateChunk,
)
from paceline.optim.partitioned import MOST_STATES
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.update_log import (
    Call,
    Peer,
    UpdateLog,
    expect_reply,
)
from paceline.parameter_server.state_machine.server import description_of, difference
from paceline.parameter_server.state_machine.store import State
from paceline.transport.protocol import LARGEST_PAYLOAD_BYTES, describe

ALL_RECEIVED = -1
"""Replaces a part's number: the receiver has all parts, and the sender can drop the snapshot."""
Part = tuple[torch.Tensor, list[list[tuple[str, int | float]]]]
"""A payload, and the entries that describe it if it is optimizer state."""


class StateSnapshot:
    """The present state of a server that has parameters.

    Parts 2i and 2i + 1 are the parameters and the optimizer state of the i-th bucket that the
    server holds. Two more follow: untrained tensors, and buffers.

    Args:
        key: Names the snapshot.
        local: The server.
        log: Its update log.
        cut: Number of consistent cuts that it has completed.
        active: Whether it has all updates.
    """

    def __init__(
        self, key: int, local: LocalServer, log: UpdateLog, cut: int, active: bool
    ) -> None:
        self.key = key
        shard, untrained = local.shard, local.untrained
        self._parts: list[Part] = []
        for bucket in shard.buckets:
            parameters = local.on_wire(bucket, shard.store.parameters(bucket))
            entries, state = shard.store.state(bucket)
            self._parts.append((parameters, []))
            self._parts.append((local.on_wire(bucket, state), entries))
        buffers = untrained.buffers
        if buffers is None:
            buffers = torch.empty(0, dtype=torch.float64)
        self._parts += [(untrained.bytes, []), (buffers, [])]
        step = local.completed_step()
        self.manifest = Manifest(
            active=active,
            join=local.saved_join().numpy().tobytes(),
            step=shard.slowest_step() if step is None else step,
            loads=shard.loads,
            gradients=local.gradients,
            cut=cut,
            versions=list(shard.store.versions),
            taken=log.vector(),
            parts=[_dtype_and_elements(payload) for payload, _ in self._parts],
            floats=local.mixed_floats,
            applied={w: dict(mine) for w, mine in shard.store.applied.items()},
        )

    def part(self, number: int) -> Part:
        """Return one part. Raises `UsageError` for a number out of range."""
        if not 0 <= number < len(self._parts):
            raise UsageError(f"state: part {number} of {len(self._parts)}")
        return self._parts[number]


class Adopter(Protocol):
    """Starts a `StateTransfer`, and continues when that ends."""

    def on_state_adopted(self, manifest: Manifest) -> None:
        """Continue with the whole state, which the local server has adopted."""
        ...

    def on_state_gone(self) -> None:
        """Continue without the state: the peer has dropped the snapshot."""
        ...


class StateTransfer:
    """Copies the snapshot with this *key* from *peer* to *local*, for an *adopter*."""

    def __init__(
        self, local: LocalServer, peer: Peer, key: int, adopter: Adopter
    ) -> None:
        self._local, self._peer, self._key = local, peer, key
        self._adopter = adopter
        self._payloads: dict[int, torch.Tensor | None] = {}
        self._states: dict[int, list[State]] = {}
        self._calls: set[Call] = set()

    def cancel(self) -> None:
        """Stop the transfer."""
        self._peer.cancel(self._calls)

    def begin(self, manifest: Manifest) -> None:
        """Request all parts. Raises `UsageError` if they do not fit this training."""
        local = self._local
        if not local.shard.is_held:
            join = torch.frombuffer(bytearray(manifest.join), dtype=torch.uint8)
            local.restore_join(join)
            local.resume(manifest.step)
        _check(local, manifest)
        for number, (dtype, elements) in enumerate(manifest.parts):
            into = torch.empty(elements, dtype=DTYPES[dtype]) if elements else None
            place, _ = divmod(number, 2)
            if into is not None and place < len(local.shard.buckets):
                into = local.on_wire(local.shard.buckets[place], into)
            request = GetState(key=self._key, part=number)
            then = partial(self._on_chunk, manifest, number)
            self._calls.add(self._peer.call(request, then, into))

    def _on_chunk(
        self,
        manifest: Manifest,
        number: int,
        reply: ReplyMessage,
        payload: torch.Tensor | None,
    ) -> None:
        if isinstance(reply, Rejected):
            self.cancel()
            self._adopter.on_state_gone()
            return
        chunk = expect_reply(reply, StateChunk, self._peer)
        store, buckets = self._local.shard.store, self._local.shard.buckets
        place, is_state = divmod(number, 2)
        if place < len(buckets) and is_state:
            bucket = buckets[place]
            self._states[place] = store.fitting_state(bucket, chunk.entries, payload)
        self._payloads[number] = payload
        if len(self._payloads) == len(manifest.parts):
            self._adopt(manifest)
            self._peer.notify(GetState(key=self._key, part=ALL_RECEIVED))
            self._adopter.on_state_adopted(manifest)

    def _adopt(self, manifest: Manifest) -> None:
        """Adopt the state, of which all parts have arrived."""
        places = range(len(self._local.shard.buckets))
        parameters = []
        for place in places:
            values = self._payloads[2 * place]
            assert values is not None
            parameters.append(values)
        untrained, buffers = [self._payloads[2 * len(places) + i] for i in (0, 1)]
        if untrained is None:
            untrained = torch.empty(0, dtype=torch.uint8)
        self._local.adopt_state(
            manifest,
            parameters,
            [self._states[place] for place in places],
            untrained,
            buffers,
        )


def _dtype_and_elements(payload: torch.Tensor) -> tuple[str, int]:
    dtype, elements = describe(payload)
    assert dtype is not None
    return dtype, elements


def _check(local: LocalServer, manifest: Manifest) -> None:
    """Raise `UsageError` unless a state fits this training."""
    ours, theirs = (
        description_of(msgspec.msgpack.decode(join, type=Join))
        for join in (local.saved_join().numpy().tobytes(), manifest.join)
    )
    if what := difference(ours, theirs):
        raise UsageError(
            f"group servers train different things: {what} is {ours[what]} here and "
            f"{theirs[what]} there; start all of them with the same options, for the same "
            "job, and remove snapshots of others"
        )
    store, expected = local.shard.store, []
    for bucket in local.shard.buckets:
        dtype, elements = _dtype_and_elements(store.flats[bucket])
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
            f"state: expected parts {expected}, as in this training, got {manifest.parts}"
        )
