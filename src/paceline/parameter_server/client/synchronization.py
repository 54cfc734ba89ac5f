"""Brings a worker and its servers to one state: joining, pulling, loading, and barriers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import torch

from paceline.interfaces import PendingReply
from paceline.interfaces.buckets import stand_alike
from paceline.interfaces.server_messages import (
    BarrierPassed,
    EnterBarrier,
    Join,
    Joined,
    KeepAlive,
    Load,
    Parameters,
    Pull,
)
from paceline.parameter_server.client.partition import BucketPart, Partition
from paceline.parameter_server.client.remote_state import (
    RemoteBuffers,
    RemoteOptimizerState,
)


class Synchronizer:
    """Brings worker *rank* and the servers of a *partition* to one state.

    *loads_untrained*: workers communicate through servers only, so all begin with rank 0's
    *buffers*.
    """

    def __init__(
        self,
        rank: int,
        partition: Partition,
        optimizer_state: RemoteOptimizerState,
        buffers: RemoteBuffers,
        loads_untrained: bool,
    ) -> None:
        self._rank, self._partition = rank, partition
        self._optimizer_state, self._buffers = optimizer_state, buffers
        self._loads_untrained = loads_untrained
        self.first_step = 0
        """The number of this worker's first step."""
        self.is_late_joiner = False
        """Whether this worker has joined a running training."""
        self.had_finished = False
        """Whether an earlier incarnation of this worker has done all of its steps."""
        self._loads = [0] * len(partition.endpoints)
        """By server: the number of loads in its last reply."""

    # ---- joining ----

    def join(self, training: Join) -> int:
        """Join the training, and pull the servers' parameters into the model. Returns `first_step`.

        *training* is the description for all servers; each also gets its number and its units.
        """
        # The other workers may be at a barrier, at one server after the other. A joining worker
        # visits the servers, and pulls from them, in reverse order. So no server delays it before
        # it reaches the one where the others wait for it.
        partition, empty = self._partition, list[int]()
        steps, own = [0], list[int]()
        for server in reversed(range(len(partition.endpoints))):
            request = msgspec.structs.replace(
                training, shard=server, units=partition.units_on(server)
            )
            reply = partition.endpoints[server].request(request).wait()
            assert isinstance(reply, Joined), reply
            self._loads[server] = reply.load
            self.is_late_joiner = self.is_late_joiner or reply.late_joiner
            self.had_finished = self.had_finished or reply.over
            if server in partition.homes:
                steps.append(reply.step)
                own.append(reply.own)
            empty += [] if reply.loaded else [server]
        if empty and self._rank == 0:
            state = dict(partition.optimizer.state) or None
            self._load(empty, state, self._loads_untrained)
        # Gradients of later steps that a server already has are acknowledged, and not applied again.
        step = max(*steps, min(own))
        partition.optimizer.state.clear()
        # Servers may be at different steps: send the latest step to all before waiting for any.
        if step or self.is_late_joiner:
            message = KeepAlive(step=step, late_joiner=self.is_late_joiner)
            ends = [partition.endpoints[server] for server in partition.servers]
            for pending_reply in [end.request(message) for end in ends]:
                pending_reply.wait()
        if self.is_late_joiner:
            self._peek_at_barriers()
        for server in reversed(partition.homes):
            self.pull(partition.pulled([server]), step)
        partition.write_model()
        # If this worker has left before, no barrier admits it. On other servers it leaves next, so
        # no barrier needs it.
        if not self.had_finished:
            self._pass_loads_under_way(step)
        if self._loads_untrained or max(self._loads):
            self._buffers.pull()
        self.first_step = step
        return step

    def _peek_at_barriers(self) -> None:
        """Pull a part from servers with barriers that this worker does not use otherwise.

        A barrier waits for a returning worker once its server has sent it parameters, and the
        server sends none while other workers wait there. So the worker peeks there first. Its later
        pulls from other servers then have the state after the barrier.
        """
        partition = self._partition
        for server in partition.barriers:
            if server not in partition.homes:
                part = partition.pulled()[0]
                pull = Pull(bucket=part.bucket, peek=True)
                like = partition.received_part(part)
                into = stand_alike(torch.empty_like(like), like)
                reply = partition.endpoints[server].request(pull, into=into).wait()
                assert isinstance(reply, Parameters), reply
                self._loads[server] = reply.load

    def _pass_loads_under_way(self, step: int) -> None:
        """Take part in a load that other workers have begun.

        Some servers may have completed that load, and the others wait for this worker, too.
        """
        while True:
            most = max(self._loads)
            behind = [s for s in self._partition.barriers if self._loads[s] < most]
            if not behind:
                return
            for server, _ in self._pass_barriers(behind, EnterBarrier(kind="load")):
                self.pull_model(step)
                self._has_pulled(server)

    # ---- barriers and loads ----

    def barrier(self, step: int) -> bool:
        """Wait for all workers that train: then each has the replies to its messages.

        *step* is this worker's next one, 0 before the first. Returns whether this is the lowest
        rank at the barrier. Collective over active workers.
        """
        servers = self._partition.barriers
        enter = EnterBarrier(kind="meet", step=step)
        passed = dict(self._pass_barriers(servers, enter))
        return passed[servers[0]]

    def load(
        self, state: dict[torch.Tensor, dict[str, Any]] | None, untrained: bool
    ) -> None:
        """Give the lowest active rank's state to the servers and all workers.

        Loads the model's parameters since the last step, the optimizer's *state* unless it is None,
        and the *untrained* tensors. Collective over the active workers.
        """
        partition = self._partition
        enter = EnterBarrier(kind="load", brings=True)
        for server, leads in self._pass_barriers(partition.barriers, enter):
            if leads:
                self._load([server], state, untrained)
            self.pull(partition.pulled(partition.loaded_through(server)))
            if untrained and server == partition.barriers[0]:
                self._buffers.pull()
            self._has_pulled(server)
        partition.write_model()

    def _pass_barriers(
        self, servers: Collection[int], enter: EnterBarrier
    ) -> Iterator[tuple[int, bool]]:
        """Enter the barriers of these servers.

        Yields each server when all workers have arrived there, and whether this worker sends the
        loaded state. All workers visit the servers in the same order, so a waiting worker has done
        its part at the servers before.
        """
        endpoints = self._partition.endpoints
        waiting = [(server, endpoints[server].request(enter)) for server in servers]
        for server, pending_reply in waiting:
            reply = pending_reply.wait()
            assert isinstance(reply, BarrierPassed), reply
            yield server, reply.leads

    def _has_pulled(self, server: int) -> None:
        for _ in self._pass_barriers([server], EnterBarrier(kind="pulled")):
            pass

    def _load(
        self,
        servers: Collection[int],
        state: dict[torch.Tensor, dict[str, Any]] | None,
        untrained: bool,
    ) -> None:
        """Send these servers the state from which all workers continue.

        It takes effect with the parameters, which come last.
        """
        partition = self._partition
        if untrained:
            self._buffers.load(servers)
        if state is not None:
            self._optimizer_state.load(servers, state)
        if partition.was_written:
            # Parameters that the script has not written may be out of date here.
            homes = {home for s in servers for home in partition.loaded_through(s)}
            for pending_reply in [self._request(p, 0) for p in partition.pulled(homes)]:
                pending_reply.wait()
        partition.read_model()
        waiting = [
            partition.endpoints[server].request(
                Load(bucket=part.bucket), partition.received_part(part)
            )
            for server, part in partition.held(servers)
        ]
        for pending_reply in waiting:
            pending_reply.wait()

    # ---- pulls ----

    def pull_model(self, step: int = 0) -> None:
        """Pull the servers' parameters, of *step* or newer, into the model."""
        self.pull(self._partition.pulled(), step)
        self._partition.write_model()

    def pull(self, parts: Sequence[BucketPart], step: int = 0) -> None:
        """Pull *parts*, of *step* or newer, without writing them into the model."""
        waiting = [self._request(part, step) for part in parts]
        replies = [pending_reply.wait() for pending_reply in waiting]
        for part, reply in zip(parts, replies, strict=True):
            assert isinstance(reply, Parameters), reply
            home = self._partition.home[part.shard]
            self._loads[home] = max(self._loads[home], reply.load)
            self._partition.note_reply(part, reply)
            self._partition.note_sequence(part, reply.sequence)

    def peek(self) -> None:
        """Write the servers' parameters into the model, but keep the received ones.

        So this worker still holds the parameters that servers expect it to hold.
        """
        partition = self._partition
        held = partition.received
        partition.received = [stand_alike(torch.empty_like(h), h) for h in held]
        try:
            parts = partition.pulled()
            for pending_reply in [self._request(part, 0, peek=True) for part in parts]:
                pending_reply.wait()
            partition.write_model()
        finally:
            partition.received = held

    def restore(self) -> None:
        """Pull everything, and so discard values that the script has written."""
        self.pull_model()
        self._buffers.pull()

    def pull_final(self) -> None:
        """Pull the final state, after all workers are done.

        This worker may have left before the others.
        """
        before = max(self._loads)
        self.pull_model()
        # Workers that trained longer have loaded.
        if max(self._loads) > before:
            self._buffers.pull()

    def _request(self, part: BucketPart, step: int, peek: bool = False) -> PendingReply:
        """Pull a part of a bucket, of *step* or newer. *peek*: see `Pull`."""
        pull = Pull(bucket=part.bucket, step=step, peek=peek)
        into = self._partition.received_part(part)
        return self._partition.endpoint(part).request(pull, into=into)
