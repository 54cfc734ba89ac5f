"""A worker's side of its job's slots, as a state machine: no I/O, and time is told.

Theory of operation
-------------------
Operations follow each other in one stream of chunks, numbered on and on: chunk j in slot j mod s,
round j div s (see `slots`). At the start s chunks are sent; each sum that comes back lets
the next chunk of its slot go. So results clock what is sent, and s is the window.

========== ========================= ===================================== ===============
slot       event                     what changes                          sends
========== ========================= ===================================== ===============
idle       its next chunk is ready   under way, a timer runs               the chunk
under way  the sum of its chunk      the operation takes it; LOCAL: idle,  -
                                     ONWARD: idle if it is freed
under way  freed                     FORWARD: idle, ONWARD: idle if the    -
                                     sum is here
under way  its timer                 the timer runs twice as long          the chunk again
any        the sum of another chunk  -                                     -
========== ========================= ===================================== ===============

A sum is taken once: what comes again, late or twice is of a chunk that is no longer under way,
and is counted. Whoever keeps a chunk waiting, the others send theirs again now and then; the
aggregator drops these without harm. A worker gives up when nothing came of all it has sent for
`Stream.silent_seconds`; how long is too long its owner says.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from paceline.collectives.in_network.operations import Operation
from paceline.collectives.in_network.packets import (
    HEADER_BYTES,
    LOCAL,
    MODES,
    Array,
    Flag,
    Kind,
    blank,
)
from paceline.collectives.in_network.timers import (
    FEWEST,
    LONGEST,
    SHORTEST,
    RoundTrip,
    Window,
)
from paceline.errors import UsageError

_IDLE = -1
_ROUNDS = 1 << 32
"""That a datagram can name."""


class Stream:
    """One worker's stream through a lease of *slots*, of datagrams of *elements*."""

    def __init__(
        self, *, slots: int, elements: int, worker: int, number: int = 0
    ) -> None:
        """*number*: the aggregator's of the job."""
        self.slots, self.elements = slots, elements
        self._worker, self._number = worker, number
        self._operation: Operation | None = None
        self._modes = np.zeros(0, np.uint8)
        """Of the operation's chunks."""
        self._first = self._end = 0
        """The operation's chunks, counted over the stream."""
        self._next = np.arange(slots)
        """Per slot: the next chunk of it."""
        self._chunk = np.full(slots, _IDLE)
        """Per slot: what is under way in it."""
        self._sent_at = np.zeros(slots)
        self._due_at = np.full(slots, np.inf)
        self._times = np.zeros(slots, np.int64)
        self._summed = np.zeros(slots, np.bool_)
        self._freed = np.zeros(slots, np.bool_)
        self._left = 0
        self._heard_at = 0.0
        self.held = False
        """Whether more would have been due the last time, had there been room."""
        self.round_trip = RoundTrip()
        self.window = Window(slots, HEADER_BYTES + 4 * elements)
        self.counts: Counter[str] = Counter()

    def begin(
        self, operation: Operation, now: float, *, mode: Flag | Array = LOCAL
    ) -> None:
        """The next operation, once the last one is `finished`. With *mode* (one, or one per
        chunk) FORWARD its sums
        leave the rack: nothing is taken, and a chunk is done when its slot is freed; with
        ONWARD it is done when that has happened and its sum is here. Raises
        `UsageError` after 2^32 rounds: some 100 TB for each 32 slots."""
        assert self.finished, "an operation is under way"
        if self._end + operation.chunks > _ROUNDS * self.slots:
            raise UsageError(
                f"this job's {_ROUNDS} rounds of {self.slots} slots are used up: register anew, "
                "under another name"
            )
        self._operation = operation
        modes = np.broadcast_to(np.asarray(mode, np.uint8), operation.chunks)
        self._modes = modes & np.uint8(MODES)
        self._first, self._end = self._end, self._end + operation.chunks
        self._left = operation.chunks
        self._heard_at = now

    @property
    def finished(self) -> bool:
        """Whether all sums of the operation are here."""
        return self._left == 0

    @property
    def deadline(self) -> float:
        """When something is to be sent again; never, where nothing is under way."""
        return float(self._due_at.min())

    def silent_seconds(self, now: float) -> float:
        """For how long nothing has come of what is under way."""
        return 0.0 if self.finished else now - self._heard_at

    def due(self, now: float, room: int | None = None) -> Array:
        """What is to be sent now, without tag: the next chunks of slots that are idle, no more
        than there is *room* for (see `held`), and what nothing was heard of in time."""
        if self._operation is None or self.finished:
            return blank(0, self.elements)
        new = self._startable()
        self.held = room is not None and len(new) > room
        if self.held:
            new = new[:room]
        if len(new):
            self._chunk[new] = self._next[new]
            self._next[new] += self.slots
            self._sent_at[new] = now
            self._times[new] = 0
            modes = self._modes[self._chunk[new] - self._first]
            self._summed[new] = modes == Flag.FORWARD
            self._freed[new] = modes == LOCAL
        again = self._overdue(now)
        self.counts["chunks"] += len(new)
        self.counts["repeats"] += len(again)
        slots = np.concatenate((new, again))
        packets = self._packets(slots)
        packets["header"]["flags"][len(new) :] |= np.uint8(Flag.REPEATED)
        self._times[slots] += 1
        doublings = np.minimum(self._times[slots] - 1, 16)
        waits = np.minimum(self.round_trip.timeout * np.exp2(doublings), LONGEST)
        self._due_at[slots] = now + waits
        return packets

    def _startable(self) -> Array:
        """Slots whose next chunk may be sent: as many as the window lets, the first chunks first;
        and one that comes before all that are under way, for these may wait for it."""
        assert self._operation is not None
        idle = self._chunk == _IDLE
        new = np.flatnonzero(idle & (self._next < self._end))
        if len(new):
            new = new[self._operation.ready(self._next[new] - self._first)]
        if not len(new):
            return new
        new = new[np.argsort(self._next[new])]
        under_way = self._chunk[~idle]
        room = self.window.size - len(under_way)
        if room < 1 and self._next[new[0]] < under_way.min():
            room = 1
        return new[: max(room, 0)]

    def _overdue(self, now: float) -> Array:
        """Slots whose chunk is to be sent again: half a window, those that wait longest first,
        lest the same ones fill a short queue each time. The others follow."""
        late = np.flatnonzero(self._due_at <= now)
        if not len(late):
            return late
        if self._heard_at > self._sent_at[late].min():
            self.window.missed(now, self.round_trip.timeout)
        burst = max(self.window.size // 2, FEWEST)
        late = late[np.argsort(self._due_at[late], kind="stable")]
        after = 1 + np.arange(len(late) - burst) // burst
        self._due_at[late[burst:]] = now + after * SHORTEST
        return late[:burst]

    def _packets(self, slots: Array) -> Array:
        packets = blank(len(slots), self.elements)
        if self._operation is None or not len(slots):
            return packets
        chunks, header = self._chunk[slots], packets["header"]
        header["kind"] = Kind.CONTRIBUTION
        header["flags"] = self._modes[chunks - self._first]
        header["job"] = self._number
        header["slot"] = slots
        header["round"] = chunks // self.slots
        header["worker"] = self._worker
        header["bitmap"] = 1 << self._worker
        self._operation.bring(chunks - self._first, packets)
        return packets

    def take(self, packets: Array, now: float) -> None:
        """Deal with a batch of genuine datagrams of this job."""
        header = packets["header"]
        slot = header["slot"].astype(np.int64)
        chunk = header["round"].astype(np.int64) * self.slots + slot
        here = np.flatnonzero(slot < self.slots)
        here = here[self._chunk[slot[here]] == chunk[here]]
        kind = header["kind"][here]
        summed = (kind == Kind.RESULT) | (kind == Kind.PARAMETERS)
        sums = here[summed & ~self._summed[slot[here]]]
        once_each, firsts = np.unique(slot[sums], return_index=True)
        if len(once_each) < len(sums):
            sums = sums[firsts]
        freed = slot[here[kind == Kind.FREED]]
        self._summed[slot[sums]] = True
        self._freed[freed] = True
        touched = np.unique(np.concatenate((slot[sums], freed)))
        self.counts["dropped"] += len(packets) - len(sums) - len(np.unique(freed))
        if not len(touched) or self._operation is None:
            return
        self._heard_at = now
        done = touched[self._summed[touched] & self._freed[touched]]
        self.round_trip.observe(now - self._sent_at[done])
        if len(sums):
            mine = packets if len(sums) == len(packets) else packets[sums]
            self._operation.take(chunk[sums] - self._first, mine)
        under_way = np.count_nonzero(self._chunk != _IDLE)
        self._chunk[done] = _IDLE
        if len(done) and under_way >= self.window.size - len(done):
            self.window.answered(len(done), float((now - self._sent_at[done]).max()))
        self._due_at[done] = np.inf
        self._left -= len(done)
