"""A group server as a state machine: it serves a group's workers, and exchanges updates.

It has the whole model for the workers of its group. The servers of the other groups are its peers.

Transitions
-----------
`state_machine.server` has the table of workers' requests. This table has the differences at a
server with peers.

============ ================================================ ===============================
event        change                                           reply
============ ================================================ ===============================
a worker's   As at a single server; then updates that are     as there; at server 0
request      due go to all active servers. It waits while     `BarrierPassed`, and `Done` of a
             the server enters, or quiesces. A server that is leave, once all servers have one
             away enters first.                               model (see `membership`)
Update       The discipline applies it, or buffers are        `Done` after that;
             mixed, or its origin is away. Once for each      `Rejected` for one that does not
             origin, incarnation and number, in order, when   fit: then training ends
             as many loads and cuts have ended here.
Notice       The discipline reads it, once, in order.         `Done`; `Rejected` for one that
                                                              it cannot read
GetStatus    -                                                `Status`
Enter        The sender is active. It receives the updates    `Status`; `Manifest` of a
             that *via* has not acknowledged.                 state, if this is *via*
GetState     -                                                `StateChunk`
Quiesce      No worker is served. The server sends all        `Quiesced`, once all active
             updates that the others lack.                    servers have acknowledged all
AdoptState   The server adopts the state of server 0; then    `Done`; `Rejected` for a state
             it serves workers again.                         that does not fit: then
                                                              training ends
peer lost    Updates from it go to the other servers, which   -
             may lack them. Requests to it wait.
peer back    Unanswered requests are sent again.              -
timer        The discipline acts. If a peer was lost for too  `Rejected`, to all that wait
             long, training ends.
============ ================================================ ===============================

If a server other than 0 has no workers in its group, while others train, it sends all updates that
the others lack. Then it is *away*: it receives no updates until it enters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Ask, Outputs, Reply, Sender, Service, Work
from paceline.interfaces.server_messages import (
    AdoptState,
    Away,
    Done,
    Enter,
    GetState,
    GetStatus,
    Manifest,
    MixBuffers,
    Notice,
    PeerReply,
    PeerRequest,
    Pull,
    PullBuffers,
    PullState,
    Push,
    Quiesce,
    Rejected,
    ReplyMessage,
    Request,
    Status,
    Update,
)
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.membership import Membership
from paceline.parameter_server.groups.update_log import Call, LogEntry, Peer, UpdateLog

NEEDS_THE_MODEL = (Push, Pull, PullState, PullBuffers, MixBuffers)
"""Requests for which an inactive server must enter first."""

ROUNDS_UNACKNOWLEDGED = 4
"""The most updates of each bucket that a peer may leave unacknowledged. Until it acknowledges them
no more are made: later gradients go into the next updates, which are larger."""

AT_ONCE = 0.0
"""A deadline in the past."""

WorkerRequest = tuple[Sender, Request, torch.Tensor | None]
PeerMessage = tuple[Peer, Sender, Update | Notice | Enter, torch.Tensor | None]


class GroupServer(Service):
    """The server of one group, which exchanges updates with the servers of the other groups.

    Its parts are `local`, which serves the group's workers, `log` and `membership`.

    Args:
        local: The server of the group's workers.
        servers: The names of all group servers, in the order of their groups. In requests server
            *i* is sender *workers* + *i*.
        incarnation: Larger than that of any process that was this server before.
        enters: Whether the other servers have the model. Then this one takes it over before it
            serves workers.
        patience: Seconds that a peer may be lost before training ends.
    """

    reconnects_to_peers = True

    def __init__(
        self,
        local: LocalServer,
        servers: Sequence[str],
        *,
        incarnation: int = 0,
        enters: bool = False,
        patience: float = math.inf,
    ) -> None:
        number, self._name = local.number, servers[local.number]
        self.local = local
        self._patience = patience
        self._peers = {
            n: Peer(n, name) for n, name in enumerate(servers) if n != number
        }
        self._by_name = {peer.name: peer for peer in self._peers.values()}
        self.log = UpdateLog(number, incarnation, self._peers)
        self.membership = Membership(local, self._peers, self.log)
        self._out: list[Reply | Ask] = []
        """Messages to send at the end of the current event."""
        self._request_numbers = itertools.count()
        self._notices_sent, self._last_notice = 0, b""
        self._next_notice: dict[int, int] = {}
        """By server: the number of the next notice of its incarnation."""
        self._peer_requests: list[PeerMessage] = []
        """Other servers' requests that wait for their turn."""
        self._worker_requests: list[WorkerRequest] = []
        """Workers' requests that are not served yet."""
        self._fault = ""
        self.holds_model = not enters
        if enters and self._peers:
            self.membership.enter()
        elif enters:
            self._note_whether_it_holds_the_model()

    # ---- the `Service` ----

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Outputs:
        self.local.shard.now = now
        if sender.worker >= self.local.workers:
            self._on_peer_request(sender, message, payload)
        elif isinstance(message, PeerRequest):
            self._reject(sender, "only the other servers of the job say that")
        elif self._fault:
            self._reject(sender, self._fault)
        else:
            self._worker_requests.append((sender, message, payload))
        return self._advance()

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> Outputs:
        self.local.shard.now = now
        if worker < self.local.workers:
            self._out += self.local.on_worker_lost(worker, incarnation, now)
        else:
            # It is a peer's connection; the peer sends unanswered requests again.
            lost = worker, incarnation
            self._peer_requests = [r for r in self._peer_requests if r[1][:2] != lost]
        return self._advance()

    def on_worker_finished(self, worker: int, now: float) -> Outputs:
        self.local.shard.now = now
        self._out += self.local.on_worker_finished(worker, now)
        return self._advance()

    def is_over(self) -> bool:
        return self.local.is_over()

    def next_deadline(self) -> float | None:
        if self._has_unsent_calls():
            return AT_ONCE
        deadlines = [self._discipline_deadline()]
        lost = [peer.lost[1] for peer in self._peers.values() if peer.lost is not None]
        if lost and not self._fault and self._patience < math.inf:
            deadlines.append(min(lost) + self._patience)
        return min((d for d in deadlines if d is not None), default=None)

    def _discipline_deadline(self) -> float | None:
        if self.membership.cut.quiesced:
            return None
        return self.local.next_deadline()

    def on_timer(self, now: float) -> Outputs:
        self.local.shard.now = now
        deadline = self._discipline_deadline()
        if deadline is not None and now >= deadline:
            self._out += self.local.on_timer(now)
        for peer in self._peers.values():
            if peer.lost is not None and now >= peer.lost[1] + self._patience:
                self._give_up(
                    f"{peer.lost[0]}, and it was not there again within "
                    f"{self._patience:g} s"
                )
        return self._advance()

    def take_work(self) -> Work:
        return self.local.take_work()

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: ReplyMessage,
        payload: torch.Tensor | None,
        now: float,
    ) -> Outputs:
        self.local.shard.now = now
        sender = self._by_name[peer]
        # It is None if the request was cancelled.
        answered = sender.in_flight.pop(number, None)
        try:
            if isinstance(answered, Call):
                sender.calls.remove(answered)
                answered.then(reply, payload)
            elif isinstance(answered, LogEntry):
                self._on_acknowledged(sender, answered, reply)
        except UsageError as error:
            self._give_up(str(error))
        return self._advance()

    def on_peer_lost(self, peer: str, reason: str, now: float) -> Outputs:
        self.local.shard.now = now
        lost = self._by_name[peer]
        lost.on_lost(reason, now)
        self.log.on_peer_lost(lost.number)
        return self._advance()

    def on_peer_back(self, peer: str, now: float) -> Outputs:
        self.local.shard.now = now
        self._by_name[peer].on_back()
        return self._advance()

    # ---- after each event ----

    def _advance(self) -> list[Reply | Ask]:
        """Do all possible work. Returns the messages to send."""
        steps = self._serve_peers, self._serve_workers, self._exchange
        while any(step() for step in steps):
            pass
        self._note_whether_it_holds_the_model()
        self._send()
        out, self._out = self._out, []
        return out

    def _serve_workers(self) -> bool:
        """Serve requests of workers. Returns whether it served one, or has replies."""
        served = False
        now = self.local.shard.now
        while self._worker_requests and not self._workers_wait():
            sender, message, payload = self._worker_requests.pop(0)
            self._out += self.local.on_request(sender, message, payload, now)
            served = True
        replies = self.local.take_replies()
        self._out += replies
        return served or bool(replies)

    def _workers_wait(self) -> bool:
        """Return whether workers must wait. A server that is away enters for the first one."""
        membership = self.membership
        if membership.is_entering or membership.cut.quiesced:
            return True
        if membership.is_member or self.local.is_over():
            return False
        if not isinstance(self._worker_requests[0][1], NEEDS_THE_MODEL):
            return False
        if not membership.is_active:
            membership.enter()
        return True

    def _exchange(self) -> bool:
        """Send updates and notices, continue with a cut, and leave.

        Returns whether any was done.
        """
        membership, cut = self.membership, self.membership.cut
        logged = self._log_updates()
        led = cut.lead()
        followed, replies = cut.follow()
        self._out += replies
        left = membership.leave(wanted=bool(self._worker_requests))
        self._send()
        return logged or led or followed or left

    def _log_updates(self) -> bool:
        """Log due updates. Returns whether there was an update or a notice."""
        membership, local = self.membership, self.local
        if not membership.is_member or membership.cut.quiesced:
            return False
        if not local.shard.is_loaded:
            return False
        notice = local.take_notice()
        if notice:
            self._notices_sent, self._last_notice = self._notices_sent + 1, notice
            for peer in self._peers.values():
                self._send_notice(peer)
            self._send()
        most = ROUNDS_UNACKNOWLEDGED * (1 + len(local.shard.buckets))
        if self.log.most_unacknowledged() >= most:
            return bool(notice)
        return membership.log_updates(everything=False) or bool(notice)

    def _send_notice(self, peer: Peer) -> None:
        """Send the last notice to a peer."""
        incarnation, number = self.log.stream[1], self._notices_sent
        content = self._last_notice
        peer.notify(Notice(incarnation=incarnation, number=number, content=content))

    def _note_whether_it_holds_the_model(self) -> None:
        membership = self.membership
        self.holds_model = membership.is_active and not membership.is_entering

    def _connected(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.lost is None]

    def _has_unsent_calls(self) -> bool:
        """Return whether this new server must still ask the others for their status."""
        return any(
            not call.is_sent for peer in self._connected() for call in peer.calls
        )

    def _send(self) -> None:
        """Send all waiting messages to peers: updates in their order, then calls."""
        here = self._connected()
        entries = [(peer, entry) for peer in here for entry in self.log.to_send(peer)]
        for peer, entry in sorted(entries, key=lambda one: one[1].number):
            request = self.log.request(entry, peer)
            self._ask(peer, entry, request, entry.payload, None)
        for peer in here:
            for call in peer.calls:
                if not call.is_sent:
                    call.is_sent = True
                    self._ask(peer, call, call.message, None, call.into)

    def _ask(
        self,
        peer: Peer,
        asked: LogEntry | Call,
        request: Request,
        payload: torch.Tensor | None,
        into: torch.Tensor | None,
    ) -> None:
        number = next(self._request_numbers)
        peer.in_flight[number] = asked
        self._out.append(Ask(peer.name, number, request, payload, into))

    def _on_acknowledged(
        self, peer: Peer, entry: LogEntry, reply: ReplyMessage
    ) -> None:
        if isinstance(reply, Rejected):
            raise UsageError(
                f"{peer.name} does not take what was applied here: {reply.reason}"
            )
        self.log.acknowledged(peer, entry)

    def _reject(self, sender: Sender, reason: str) -> None:
        self._out.append(Reply(sender, Rejected(reason=reason)))

    def _give_up(self, reason: str) -> None:
        """Reject all waiting requests, also those of peers, because training cannot continue."""
        self._fault = self._fault or f"{self._name}: {reason}"
        for _, sender, _, _ in self._peer_requests:
            self._reject(sender, self._fault)
        self._peer_requests.clear()
        self._out += self.membership.cut.give_up(self._fault)
        self.local.give_up(self._fault)
        for sender, _, _ in self._worker_requests:
            self._reject(sender, self._fault)
        self._worker_requests.clear()

    # ---- requests of other servers ----

    def _on_peer_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None
    ) -> None:
        peer = self._peers.get(sender.worker - self.local.workers)
        if peer is None or not isinstance(message, PeerRequest):
            self._reject(sender, f"{self._name}: expected what its peers say")
            return
        if self._fault:
            self._reject(sender, self._fault)
            return
        self._look_for_restart(peer, message)
        try:
            self._handle(peer, sender, message, payload)
        except UsageError as error:
            self._reject(sender, str(error))

    def _look_for_restart(self, peer: Peer, message: PeerRequest) -> None:
        """Detect a restarted peer, which has another incarnation."""
        incarnation = getattr(message, "incarnation", None)
        if isinstance(message, Update) and message.source != peer.number:
            # It names the incarnation of another server, which was lost.
            return
        before = peer.incarnation
        if incarnation is None or (before is not None and incarnation <= before):
            # The peer may forward messages of its earlier incarnation.
            return
        peer.incarnation = incarnation
        if before is None:
            return
        self.log.on_peer_lost(peer.number)
        self.log.stop_sending(peer)
        self.membership.on_peer_restarted(peer)
        self._next_notice.pop(peer.number, None)
        if self._last_notice:
            self._send_notice(peer)

    def _handle(
        self,
        peer: Peer,
        sender: Sender,
        message: PeerRequest,
        payload: torch.Tensor | None,
    ) -> None:
        """Answer a peer, now or later. Raises `UsageError` for a request that is rejected."""
        membership = self.membership
        # The peer has given up an earlier entry.
        if isinstance(message, Enter):
            self._peer_requests = [
                one
                for one in self._peer_requests
                if one[0] is not peer or not isinstance(one[2], Enter)
            ]
        if isinstance(message, Update | Notice | Enter):
            self._peer_requests.append((peer, sender, message, payload))
        elif isinstance(message, GetStatus):
            self._out.append(Reply(sender, membership.status()))
        elif isinstance(message, GetState):
            self._out.append(Reply(sender, *membership.on_get_state(peer, message)))
        elif isinstance(message, Quiesce):
            membership.cut.on_quiesce(sender)
        else:
            self._on_adopt_state(peer, message)
            self._out.append(Reply(sender, Done()))

    def _on_adopt_state(self, peer: Peer, message: AdoptState) -> None:
        try:
            self.membership.cut.on_adopt_state(peer, message)
        except UsageError as error:
            # This server stays quiesced: report the reason to its workers.
            self._give_up(f"what {peer.name} has does not fit: {error}")
            raise

    def _serve_peers(self) -> bool:
        """Carry out the requests of peers whose turn it is. Returns whether there were any."""
        waiting, self._peer_requests = self._peer_requests, []
        blocked: set[tuple[int, object]] = set()
        for request in waiting:
            peer, sender, message, _ = request
            sequence = _sequence(peer, message)
            if sequence in blocked or self._must_wait(message):
                blocked.add(sequence)
                if isinstance(message, Update) and message.source == peer.number:
                    # It may be an `Away`, which must precede the peer's next entry.
                    blocked.add((peer.number, Enter))
                self._peer_requests.append(request)
                continue
            try:
                reply = self._carry_out(request)
                # Updates in a captured state must leave before the reply.
                self._send()
                self._out.append(Reply(sender, reply))
            except UsageError as error:
                self._reject(sender, str(error))
        return len(self._peer_requests) < len(waiting)

    def _must_wait(self, message: Update | Notice | Enter) -> bool:
        enters, cut = self.membership.is_entering, self.membership.cut
        shard = self.local.shard
        if isinstance(message, Enter):
            return enters and message.via == self.local.number
        if isinstance(message, Notice):
            return enters or not shard.is_loaded
        if not self._is_current(message):
            return False
        if enters or cut.is_adopting or not shard.is_loaded:
            return True
        return message.cut > cut.ended or message.load > shard.loads

    def _is_current(self, message: Update) -> bool:
        """Return whether an update is for this entry: the server may have left, or entered again."""
        membership = self.membership
        if message.entry != membership.entry:
            return False
        return membership.is_entering or membership.is_active

    def _carry_out(self, request: PeerMessage) -> Done | PeerReply:
        peer, _, message, payload = request
        if isinstance(message, Enter):
            return self._on_enter(peer, message)
        if isinstance(message, Notice):
            if message.number >= self._next_notice.get(peer.number, 0):
                self._next_notice[peer.number] = message.number + 1
                self.local.on_notice(peer.number, message.content)
        elif self._is_current(message):
            self._on_update(peer, message, payload)
        elif isinstance(message.what, Away) and message.source == peer.number:
            self.log.stop_sending(peer)
        return Done()

    def _on_enter(self, peer: Peer, enter: Enter) -> Status | Manifest:
        if enter.via == self.local.number:
            manifest = self.membership.hand_over(enter.entry, peer)
            self.log.retain_for(peer, enter.entry, None)
            return manifest
        via = self._peers.get(enter.via)
        if via is None:
            raise UsageError(f"enter: there is no server {enter.via}")
        first = self.log.retain_for(peer, enter.entry, via)
        return msgspec.structs.replace(self.membership.status(), number=first)

    def _on_update(
        self, peer: Peer, message: Update, payload: torch.Tensor | None
    ) -> None:
        entry = LogEntry(
            origin=message.source,
            incarnation=message.incarnation,
            number=message.number,
            load=message.load,
            cut=message.cut,
            update=message.what,
            payload=payload,
        )
        if not self.log.is_new(entry.stream, entry.number):
            self.local.counts["updates that came again"] += 1
            return
        if isinstance(message.what, Away):
            source = self._peers.get(message.source)
            if source is not None and source.incarnation == message.incarnation:
                self.log.stop_sending(source)
        elif message.load == self.local.shard.loads:
            self.local.apply_update(message.source, message.what, payload)
        self.log.receive(entry, peer.number, message.floor)


def _sequence(peer: Peer, message: Update | Notice | Enter) -> tuple[int, object]:
    """Return a key: requests with the same key are carried out in their order."""
    if isinstance(message, Update):
        return message.source, message.incarnation
    return peer.number, type(message)
