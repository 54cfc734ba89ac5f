"""Servers' state beside trained parameters: optimizer state, frozen parameters, buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from paceline.interfaces import Endpoint, PendingReply
from paceline.interfaces.buckets import in_strides_of
from paceline.interfaces.server_messages import (
    Buffers,
    LoadState,
    LoadUntrained,
    MixBuffers,
    OptimizerState,
    PullBuffers,
    PullState,
    PullUntrained,
    Untrained,
)
from paceline.parameter_server.client.partition import Partition
from paceline.parameter_server.state_machine.store import (
    MOST_UNTRAINED_BYTES,
    is_per_element,
)


class RemoteOptimizerState:
    """The optimizer's state, of a model that a *partition* has on servers."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def pull(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Pull the whole state, by parameter, in torch's own form."""
        partition = self._partition
        found: dict[int, dict[str, list[Any]]] = {}
        for part in partition.pulled():
            into = torch.empty(
                8 * (part.stop - part.start),
                dtype=partition.buckets[part.bucket].buffer.dtype,
            )
            request = partition.endpoint(part).request
            reply = request(PullState(bucket=part.bucket), into=into).wait()
            assert isinstance(reply, OptimizerState), reply
            for unit, entries in zip(part.units, reply.entries, strict=True):
                mine = found.setdefault(unit.parameter, {})
                for name, value in entries:
                    whole = isinstance(value, int)
                    at = int(value)
                    mine.setdefault(name, []).append(
                        into[at : at + unit.elements].clone() if whole else value
                    )
        return {
            partition.owners[number]: {
                name: _merged(values, partition.owners[number])
                for name, values in entries.items()
            }
            for number, entries in found.items()
        }

    def load(
        self, servers: Collection[int], state: dict[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Send these servers their parts of a *state* in torch's own form."""
        for server, part in self._partition.held(servers):
            entries: list[list[tuple[str, int | float]]] = []
            buffer = self._partition.buckets[part.bucket].buffer
            parts, offset = [buffer.new_empty(0)], 0
            for unit in part.units:
                mine: list[tuple[str, int | float]] = []
                owner = self._partition.owners[unit.parameter]
                for name, value in state.get(owner, {}).items():
                    if is_per_element(value, owner):
                        mine.append((name, offset))
                        flat = value.detach().reshape(-1)
                        parts.append(flat[unit.start : unit.stop])
                        offset += unit.elements
                    elif value is not None:
                        mine.append((name, float(value)))
                entries.append(mine)
            message = LoadState(bucket=part.bucket, entries=entries)
            request = self._partition.endpoints[server].request
            request(message, torch.cat(parts)).wait()


def _merged(values: list[Any], parameter: torch.Tensor) -> Any:
    if isinstance(values[0], torch.Tensor):
        return in_strides_of(parameter, torch.cat(values).view(parameter.shape))
    return torch.tensor(values[0], dtype=torch.float32)


class RemoteBuffers:
    """Frozen parameters and buffers: the *tensors* of a model that are not trained.

    All of them travel as bytes at a load, and to workers that join. *mixed* are the buffers that
    also travel in every step, and are mixed on the server; none if each worker keeps its own.
    """

    def __init__(
        self,
        partition: Partition,
        tensors: Sequence[torch.Tensor],
        mixed: Sequence[torch.Tensor],
    ) -> None:
        self._partition = partition
        self._tensors = [t for t in tensors if t.layout == torch.strided]
        self._bytes = sum(t.numel() * t.element_size() for t in self._tensors)
        self._floats = [b for b in mixed if b.is_floating_point() and b.numel()]
        whole = [b for b in mixed if not (b.is_floating_point() or b.is_complex())]
        self._counters = [b for b in whole if b.numel()]
        self._mixing: PendingReply | None = None
        self._mixed = torch.empty(0, dtype=torch.float64)

    @property
    def _endpoint(self) -> Endpoint:
        """This worker's endpoint of the server that has these tensors for it."""
        partition = self._partition
        return partition.endpoints[partition.home[partition.untrained_shard]]

    # ---- the whole state ----

    def load(self, servers: Collection[int]) -> None:
        """Send this worker's tensors to those of *servers* that hold them."""
        partition = self._partition
        holders = partition.holders(partition.untrained_shard)
        ends = [partition.endpoints[s] for s in holders if s in servers]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8), *map(_raw, self._tensors)])
        waiting = [
            end.request(LoadUntrained(start=start), flat[start:][:MOST_UNTRAINED_BYTES])
            for end in ends
            for start in range(0, self._bytes, MOST_UNTRAINED_BYTES)
        ]
        for pending_reply in waiting:
            pending_reply.wait()

    def pull(self) -> None:
        """Pull the server's tensors, if a worker has loaded any."""
        into = torch.empty(self._bytes, dtype=torch.uint8)
        waiting = [
            self._endpoint.request(
                PullUntrained(start=start, most=MOST_UNTRAINED_BYTES),
                into=into[start:][:MOST_UNTRAINED_BYTES],
            )
            for start in range(0, self._bytes, MOST_UNTRAINED_BYTES)
        ]
        replies = [pending_reply.wait() for pending_reply in waiting]
        if not replies or not all(
            isinstance(reply, Untrained) and reply.whole for reply in replies
        ):
            return
        sizes = [t.numel() * t.element_size() for t in self._tensors]
        with torch.no_grad():
            for tensor, part in zip(self._tensors, into.split(sizes), strict=True):
                # Copy, since a part may begin at an offset that is not aligned for this type.
                value = part.clone().view(tensor.dtype).view(tensor.shape)
                if not torch.equal(_raw(tensor), part):
                    tensor.copy_(value)
        self.pull_mixed()

    def pull_mixed(self) -> None:
        """Pull the buffers as mixed since the last load."""
        if not (self._floats or self._counters):
            return
        into = self._flat()
        before = into.clone()
        self._endpoint.request(PullBuffers(), into=into).wait()
        if not torch.equal(before, into):
            self._mixed = into
            self._write()

    # ---- buffers, in each step ----

    def mix(self, weight: float) -> None:
        """Send BatchNorm statistics to the server, which mixes them with those of all workers.

        `wait` gets the result.
        """
        if not (self._floats or self._counters):
            return
        self._mixed = self._flat()
        message = MixBuffers(weight=weight, floats=sum(b.numel() for b in self._floats))
        self._mixing = self._endpoint.request(message, self._mixed, self._mixed)

    def wait(self) -> None:
        """Wait for mixed buffers, if `mix` has requested them, and write them into the model."""
        if self._mixing is not None:
            reply = self._mixing.wait()
            assert isinstance(reply, Buffers), reply
            self._mixing = None
            self._write()

    def _flat(self) -> torch.Tensor:
        tensors = [*self._floats, *self._counters]
        return torch.cat([t.detach().reshape(-1).double() for t in tensors]).cpu()

    def _write(self) -> None:
        tensors = [*self._floats, *self._counters]
        parts = self._mixed.split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                # Integers beyond 2^53 are rounded in transit, so unchanged values are not written.
                if not torch.equal(tensor.detach().reshape(-1).double().cpu(), part):
                    tensor.copy_(part.view(tensor.shape))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
