"""Tracks which group servers exchange updates, and brings all of them to one model.

*`Membership`*: a server is active, away, or entering. A server without workers leaves. It enters
again when a worker needs it:

1. It asks all others for their status. It chooses the lowest one that is active. If none is active,
   it chooses
   the one whose model is furthest, which may be its own.
2. It asks the others for their updates from now on, and for those that the chosen one has not
   acknowledged.
3. It asks the chosen one for its state. Every update is then in that state, or on its way here.
   Updates that arrive meanwhile wait; those that are in the state are dropped.

If another server restarts meanwhile, it enters anew, with another number.

*`ConsistentCut`*: all workers wait for each other at server 0. Server 0 holds back its replies, and
asks the others to *quiesce*: they stop serving workers, and send all updates that the others lack.
They reply once all others have acknowledged these. Now every server has all updates, each in an
order of its own. All adopt the state of server 0, to the bit. So a checkpoint, a load and the end
of a training have one model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from paceline.errors import UsageError
from paceline.interfaces import GroupUpdate, Reply, Sender
from paceline.interfaces.server_messages import (
    AdoptState,
    Away,
    BufferUpdate,
    Done,
    Enter,
    GetState,
    GetStatus,
    GradientUpdate,
    Manifest,
    Quiesce,
    Quiesced,
    Rejected,
    ReplyMessage,
    Request,
    StateChunk,
    Status,
)
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.state_transfer import (
    ALL_RECEIVED,
    StateSnapshot,
    StateTransfer,
)
from paceline.parameter_server.groups.update_log import (
    Call,
    Peer,
    UpdateLog,
    expect_reply,
)

ENTRIES_AN_INCARNATION = 1 << 20
"""Size of an incarnation's range of entry numbers, so that later incarnations have larger ones."""


class Membership:
    """The membership of server *local* among its *peers*, with which it exchanges a *log*."""

    def __init__(
        self, local: LocalServer, peers: Mapping[int, Peer], log: UpdateLog
    ) -> None:
        self.local, self.peers, self.log = local, peers, log
        self.cut = ConsistentCut(self)
        self.is_active = True
        """Whether the other servers send updates to this one."""
        self.is_entering = False
        """Whether it is entering, to get all updates."""
        self._is_leaving = False
        """Whether it has sent `Away`, and not all peers have acknowledged it."""
        self.entry = 0
        """Number of this server's last entry or departure."""
        self._entries = 0
        self._snapshots: dict[int, StateSnapshot] = {}
        """By server that adopts a snapshot: the snapshot."""
        # The state of the present entry:
        self._calls: set[Call] = set()
        self._statuses: dict[int, Status] = {}
        """By server: its status before it begins to send updates."""
        self._senders: dict[int, Status] = {}
        """By server that sends updates now: its status, with the number of its first update."""
        self._via: int | None = None
        """The server whose state this one adopts."""
        self._transfer: StateTransfer | None = None

    @property
    def is_member(self) -> bool:
        """Whether it has all updates, and sends its own."""
        return self.is_active and not self._is_leaving and not self.is_entering

    def status(self) -> Status:
        """Return this server's status, for other servers."""
        return Status(
            incarnation=self.log.stream[1],
            number=self.log.next_number(self.log.stream),
            entry=self.entry,
            active=self.is_member,
            progress=self.local.progress,
            cut=self.cut.ended,
        )

    def on_peer_restarted(self, peer: Peer) -> None:
        """Drop the requests of a peer's earlier incarnation, after its restart."""
        self._snapshots.pop(peer.number, None)
        if self.is_entering and peer.number in self._statuses:
            self.enter()
        self.cut.on_peer_restarted(peer)

    # ---- its updates ----

    def log_updates(self, everything: bool) -> bool:
        """Append the updates that are due to the log; *everything*: all that other servers lack.

        Returns:
            Whether there were any.
        """
        local = self.local
        updates = local.take_updates(everything)
        for update in updates:
            values = local.on_wire(update.bucket, update.values)
            self._append(_message(update), values)
        last = local.shard.buckets[-1] if updates else None
        if everything or any(update.bucket == last for update in updates):
            buffers = local.take_buffer_update()
            if buffers is not None:
                self._append(*buffers)
        return bool(updates)

    def _append(
        self,
        update: GradientUpdate | BufferUpdate | Away,
        payload: torch.Tensor | None = None,
    ) -> None:
        self.log.append(update, payload, self.local.shard.loads, self.cut.ended)

    # ---- its state, for other servers ----

    def hand_over(self, key: int, peer: Peer) -> Manifest:
        """Return the manifest of this server's state, which *peer* adopts."""
        if self.local.shard.is_loaded:
            return self.capture(key, [peer.number])
        return Manifest(
            active=self.is_member, cut=self.cut.ended, taken=self.log.vector()
        )

    def capture(self, key: int, peers: Collection[int]) -> Manifest:
        """Store this state for these servers to adopt. All updates in it are in the log."""
        if self.is_member:
            self.log_updates(everything=True)
        snapshot = StateSnapshot(
            key, self.local, self.log, self.cut.ended, self.is_member
        )
        self._snapshots.update(dict.fromkeys(peers, snapshot))
        return snapshot.manifest

    def on_get_state(
        self, peer: Peer, get: GetState
    ) -> tuple[StateChunk, torch.Tensor | None]:
        """Return a part of the state that was captured for *peer*.

        Raises:
            UsageError: There is no such state, or no such part.
        """
        snapshot = self._snapshots.get(peer.number)
        if snapshot is None or snapshot.key != get.key:
            raise UsageError(f"state: there is no snapshot with key {get.key}")
        if get.part == ALL_RECEIVED:
            del self._snapshots[peer.number]
            return StateChunk(), None
        payload, entries = snapshot.part(get.part)
        return StateChunk(entries=entries), payload

    # ---- leaving ----

    def leave(self, wanted: bool) -> bool:
        """Take the next step towards leaving, if the group has no workers.

        Args:
            wanted: Whether a worker waits for this server.

        Returns:
            Whether there was one.
        """
        if self._is_leaving:
            if not self.log.all_acknowledged():
                return False
            self.is_active = self._is_leaving = False
            # Updates sent to it before are dropped.
            self._next_entry()
        elif wanted or not self._may_leave():
            return False
        elif not self.log_updates(everything=True):
            self._append(Away())
            self._is_leaving = True
        return True

    def _may_leave(self) -> bool:
        """Return whether the others can continue without it.

        Server 0 stays, and must have all updates of this one. If workers come back after a death,
        server 1 stays, too: then no update is lost if one of the two dies.
        """
        local = self.local
        stays = 2 if local.members.return_from_loss else 1
        if local.number < stays or not self.is_member or self.cut.quiesced:
            return False
        zero = self.peers[0]
        has_all = zero.active and zero.lost is None and not zero.unacknowledged()
        return has_all and local.shard.is_loaded and not local.has_workers()

    # ---- entering ----

    def enter(self) -> None:
        """Ask all servers for their status; start again if it was entering before."""
        for peer in self.peers.values():
            peer.cancel(self._calls)
        if self._transfer is not None:
            self._transfer.cancel()
        self._next_entry()
        self.is_entering = True
        self._calls, self._transfer, self._via = set(), None, None
        self._statuses, self._senders = {}, {}
        for peer in self.peers.values():
            get_status = GetStatus(incarnation=self.log.stream[1])
            self._call(peer, get_status, self._on_status)

    def _next_entry(self) -> None:
        self._entries += 1
        self.entry = self.log.stream[1] * ENTRIES_AN_INCARNATION + self._entries

    def _call(
        self, peer: Peer, message: Request, then: Callable[[Peer, ReplyMessage], None]
    ) -> None:
        call = peer.call(message, lambda reply, payload: then(peer, reply))
        self._calls.add(call)

    def _on_status(self, peer: Peer, reply: ReplyMessage) -> None:
        status = expect_reply(reply, Status, peer)
        self._statuses[peer.number] = status
        peer.on_status(status.incarnation, status.entry, status.active)
        if len(self._statuses) < len(self.peers):
            return
        self._via = via = self._choose()
        for other in self.peers.values():
            if other.number != via:
                self._call(other, self._request(via), self._on_sender)
        self._ask_via()

    def _choose(self) -> int:
        """Return the lowest active server that has a model; else the one whose model is furthest."""
        known = {n: (s.active, s.progress) for n, s in self._statuses.items()}
        known[self.local.number] = (False, self.local.progress)
        keys = {
            number: (active, min(progress, 0) if active else progress, -number)
            for number, (active, progress) in known.items()
        }
        return max(keys, key=lambda number: keys[number])

    def _request(self, via: int) -> Enter:
        return Enter(incarnation=self.log.stream[1], entry=self.entry, via=via)

    def _on_sender(self, peer: Peer, reply: ReplyMessage) -> None:
        """Note that this peer sends its updates from now on."""
        status = expect_reply(reply, Status, peer)
        self._senders[peer.number] = status
        peer.on_status(status.incarnation, status.entry, status.active)
        self._ask_via()

    def _ask_via(self) -> None:
        """Ask the chosen server for its state, once all others send their updates."""
        via = self._via
        assert via is not None
        if self._senders.keys() | {via} != self.peers.keys() | {via}:
            return
        if via == self.local.number:
            self._end_entering(0)
        else:
            self._call(self.peers[via], self._request(via), self._on_manifest)

    def _on_manifest(self, via: Peer, reply: ReplyMessage) -> None:
        manifest = expect_reply(reply, Manifest, via)
        if self._statuses[via.number].active and not manifest.active:
            # It has left meanwhile: other servers have updates that it lacks.
            self.enter()
        elif not manifest.join:
            # Nothing was loaded there yet.
            self.on_state_adopted(manifest)
        else:
            self._transfer = StateTransfer(self.local, via, self.entry, self)
            self._transfer.begin(manifest)

    def on_state_gone(self) -> None:
        """Enter again, because the chosen server has dropped its state."""
        self.enter()

    def on_state_adopted(self, manifest: Manifest) -> None:
        """End the entry with the chosen server's state, which this server now has."""
        self.log.restore(manifest.taken)
        self._end_entering(manifest.cut)

    def _end_entering(self, cut: int) -> None:
        """Become active: this server has all updates, or receives them."""
        via = self._statuses.get(-1 if self._via is None else self._via)
        if via is None or not via.active:
            # No server was active: the others' earlier updates are lost.
            for number, first in self._senders.items():
                self.log.skip((number, first.incarnation), first.number)
        self.is_active, self.is_entering, self._is_leaving = True, False, False
        self._transfer = None
        # Some servers may have ended a cut, in which an earlier server 0 was lost, before others
        # began it. Then the others would hold back updates of the former.
        self.cut.ended = max(
            [self.cut.ended, cut, *(s.cut for s in self._statuses.values())]
        )
        if not self.local.number:
            for number, status in self._statuses.items():
                if status.cut < self.cut.ended:
                    self.cut.tell_of_end(self.peers[number])


class ConsistentCut:
    """The present cut, at server 0 and at the others.

    Args:
        membership: This server's membership.
    """

    adopts_state = True
    """Whether the other servers adopt the state of server 0. Tests turn it off, to check that all
    models are equal up to the order of additions."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.ended = 0
        """Number of cuts that have ended here."""
        self.quiesced = False
        """Whether this server has stopped serving workers."""
        self.is_adopting = False
        """Whether this server receives the state of server 0: it applies no update meanwhile."""
        self._quiesced: dict[int, bool] = {}
        """On server 0, by server that has quiesced: whether its model has changed."""
        self._asked: Sender | None = None
        """On other servers: the unanswered request of server 0 to quiesce."""
        self._transfer: StateTransfer | None = None
        self._adopted = 0
        """The number of the cut whose state is being received."""
        self._progress_before: int | None = None
        """The progress of this server at the end of the last cut."""

    # ---- on server 0 ----

    def lead(self) -> bool:
        """Begin a cut if workers wait for it, and end it once all servers have quiesced.

        Returns:
            Whether a cut has begun or ended.
        """
        membership, local = self._membership, self._membership.local
        if local.number or not (self.quiesced or local.held_replies):
            return False
        begins = not self.quiesced
        if begins:
            self._quiesced = {}
            self._quiesce()
            for peer in membership.peers.values():
                self._ask_to_quiesce(peer)
        if len(self._quiesced) < len(membership.peers):
            return begins
        if not membership.log.all_acknowledged():
            return begins
        self._end()
        return True

    def _quiesce(self) -> None:
        """Stop serving workers, and log all updates that other servers lack."""
        self.quiesced = True
        if self._membership.is_member:
            self._membership.log_updates(everything=True)

    def _ask_to_quiesce(self, peer: Peer) -> None:
        cut = self.ended + 1

        def replied(reply: ReplyMessage, payload: torch.Tensor | None) -> None:
            changed = expect_reply(reply, Quiesced, peer).changed
            if self.quiesced and cut == self.ended + 1:
                self._quiesced[peer.number] = changed

        incarnation = self._membership.log.stream[1]
        peer.call(Quiesce(incarnation=incarnation, cut=cut), replied)

    def _end(self) -> None:
        membership, local = self._membership, self._membership.local
        self.ended += 1
        changed = any(self._quiesced.values()) or self._has_changed()
        manifest = None
        if changed and self.adopts_state and membership.peers and local.shard.is_loaded:
            manifest = membership.capture(self.ended, membership.peers)
        for peer in membership.peers.values():
            self._ask_to_adopt(peer, AdoptState(cut=self.ended, manifest=manifest))
        self._go_on()
        local.release()

    def tell_of_end(self, peer: Peer) -> None:
        """End a peer's cut, after a restart of server 0.

        Other servers have ended that cut already.
        """
        self._ask_to_adopt(peer, AdoptState(cut=self.ended, manifest=None))

    def _ask_to_adopt(self, peer: Peer, message: AdoptState) -> None:
        def replied(reply: ReplyMessage, payload: torch.Tensor | None) -> None:
            # Otherwise no server can continue.
            expect_reply(reply, Done, peer)

        peer.call(message, replied)

    def _has_changed(self) -> bool:
        """Return whether this server's model has changed since the last cut."""
        return self._membership.local.progress != self._progress_before

    def _go_on(self) -> None:
        """Serve workers again."""
        self.quiesced = self.is_adopting = False
        self._transfer = None
        self._progress_before = self._membership.local.progress

    # ---- on other servers ----

    def on_quiesce(self, sender: Sender) -> None:
        """Note that server 0 asks this server to quiesce."""
        self._asked = sender

    def follow(self) -> tuple[bool, list[Reply]]:
        """Quiesce if server 0 has asked for it.

        Returns:
            Whether this server has quiesced now; and the reply to server 0, once all others have
            acknowledged this server's updates.
        """
        sender, membership = self._asked, self._membership
        if sender is None or self.is_adopting or membership.is_entering:
            return False, []
        begins = not self.quiesced
        if begins:
            self._quiesce()
        if not membership.log.all_acknowledged():
            return begins, []
        self._asked = None
        return begins, [Reply(sender, Quiesced(changed=self._has_changed()))]

    def on_adopt_state(self, source: Peer, adopt: AdoptState) -> None:
        """Adopt the state of server 0, if it sends one, after all servers have quiesced.

        Raises:
            UsageError: The state does not fit.
        """
        if adopt.cut <= self.ended or self.is_adopting:
            # This server has entered since, or the request was repeated.
            return
        if adopt.manifest is None:
            self._end_with(adopt.cut)
            return
        self.quiesced = self.is_adopting = True
        self._adopted = adopt.cut
        local = self._membership.local
        self._transfer = StateTransfer(local, source, adopt.cut, self)
        self._transfer.begin(adopt.manifest)

    def on_state_adopted(self, manifest: Manifest) -> None:
        """End the cut with the state of server 0, which this server now has."""
        self._end_with(self._adopted)

    def on_state_gone(self) -> None:
        """End the cut, because server 0 was restarted, and the others have continued."""
        self._end_with(self._adopted)

    def _end_with(self, cut: int) -> None:
        self.ended = cut
        self._go_on()

    def give_up(self, reason: str) -> list[Reply]:
        """Return the reply to a waiting server 0, because training cannot continue."""
        sender, self._asked = self._asked, None
        return [] if sender is None else [Reply(sender, Rejected(reason=reason))]

    def on_peer_restarted(self, peer: Peer) -> None:
        """Handle the restart of a peer.

        Server 0 has lost the cut, which therefore ends. Another server has to quiesce again.
        """
        if peer.number == 0:
            self._asked = None
            if self._transfer is not None:
                self._transfer.cancel()
            if self.quiesced:
                self._end_with(self.ended + 1)
        elif self.quiesced and self._quiesced.pop(peer.number, None) is not None:
            self._ask_to_quiesce(peer)


def _message(update: GroupUpdate) -> GradientUpdate:
    """Return the message of an update, without its values."""
    return GradientUpdate(
        bucket=update.bucket,
        gradients=update.gradients,
        weight=update.weight,
        used=list(update.used),
        hyperparameters=[dict(h) for h in update.hyperparameters],
        steps=dict(update.steps),
    )
