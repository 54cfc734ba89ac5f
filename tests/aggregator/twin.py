"""Slots in the kernel, a packet at a time, without a network: the kernel tries its programs on
packets that it is given (BPF_PROG_TEST_RUN)."""

import struct
from collections import Counter

import numpy as np

from paceline.aggregator.jobs import Job, Terms
from paceline.aggregator.packets import NOBODY, Kind, Seal, blank, sizes
from paceline.aggregator.protocol import EVERYONE, NEXT, Outgoing, Slots, joined

HOST, PORT = "10.77.0.100", 29700
XDP_DROP, XDP_PASS = 1, 2
PASSED_ON, LOST, REDIRECTED = -1, 2, 7
HEADERS = 42
ALL, TO_NEXT, TO_WORKER, FREED_ALL, FREED_WORKER, BACK = (1 << bit for bit in range(6))


def address_of(worker):
    return f"10.77.0.{worker + 1}", 2000 + worker


def mac_of(worker):
    return bytes((2, 0, 0, 0, 1, worker % 256))


def checksum(data):
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def frame(packet, worker=0, **changes):
    """An Ethernet frame with that datagram, from that worker. *changes*: of what is correct."""
    data = packet.tobytes()[: int(sizes(packet)[0])]
    source, (_, port) = address_of(worker % 64)[0], address_of(worker % 64)
    udp = struct.pack(
        ">4H",
        *(changes.get("source", port), changes.get("port", PORT)),
        *(changes.get("udp_bytes", 8 + len(data)), 0),
    )
    octets = lambda host: bytes(map(int, host.split(".")))  # noqa: E731
    ip = struct.pack(
        ">BBHHHBBH4s4s",
        *(changes.get("version", 0x45), 0, 28 + len(data), 0),
        *(changes.get("fragment", 0x4000), 64, changes.get("protocol", 17), 0),
        *(octets(source), octets(changes.get("host", HOST))),
    )
    ip = ip[:10] + struct.pack(">H", checksum(ip)) + ip[12:]
    eth = mac_of(100) + mac_of(worker) + struct.pack(">H", changes.get("type", 0x0800))
    return eth + ip + udp + data


def datagram_of(data, elements):
    """The datagram of a frame, as a row."""
    row = blank(1, elements)
    row["values"] = 0
    taken = np.frombuffer(data[HEADERS:], np.uint8)[: row.dtype.itemsize]
    row.view(np.uint8)[: len(taken)] = taken
    return row


_placed = []
_MOST = 50
"""Jobs that are there at a time: what Hypothesis tries are many."""


class KernelSlots:
    """As `Slots`: the job's slots in *kernel*, under *number*."""

    def __init__(self, kernel, number, slots, workers, elements, agents=1, first=0):
        self.kernel, self.slots, self.elements = kernel, slots, elements
        terms = Terms(name="job", workers=workers, slots=slots, elements=elements)
        seal = self.seal = Seal(bytes(range(32)))
        lease = range(first, first + slots)
        everyone = np.array([(1 << workers) - 1], np.uint64)
        self.job = Job(terms, number, seal, lease, None, everyone)
        _placed.append((kernel, self.job))
        if len(_placed) > _MOST:
            _placed[0][0].forget(_placed.pop(0)[1])
        kernel.place(
            self.job,
            {worker: address_of(worker) for worker in range(workers)},
            [(f"10.77.1.{agent + 1}", 3000) for agent in range(agents)],
        )

    def sealed(self, packet):
        """The job's own."""
        packet["header"]["job"] = self.job.number
        self.seal.sign(packet)
        return packet

    def state(self):
        """Rounds, bits, and so on of all versions, and their values."""
        lease = self.job.lease
        slots = np.concatenate([self.kernel.slots.read(place) for place in lease])
        return slots["versions"], slots["values"].view("<i4")[..., : self.elements]

    def take(self, packets):
        found = [self._take(packets[row : row + 1]) for row in range(len(packets))]
        answers = [one for several in found for one in several]
        return joined(answers, packets.dtype)

    def _take(self, packet):
        packet = self.sealed(packet.copy())
        worker = int(packet["header"]["worker"][0])
        sent = frame(packet, worker)
        result, data, _ = self.kernel.objects.run("receive", sent)
        if result == XDP_DROP:
            return []
        assert result == XDP_PASS
        marked = datagram_of(data, self.elements)["header"][0]
        assert marked["tag"] == self.kernel.cookie, "it was passed on to sockets"
        verdict = int(marked["kind"])
        if verdict == BACK:
            answers = [self._answer(packet, worker)]
        else:
            answers = list(self._answers(marked, verdict, worker))
        self._check_last(data, verdict, answers[-1])
        return answers

    def _answers(self, marked, verdict, worker):
        asker = EVERYONE if worker == NOBODY else worker
        for bit, to, kind in (
            *((ALL, EVERYONE, Kind.RESULT), (TO_WORKER, asker, Kind.RESULT)),
            *((TO_NEXT, NEXT, Kind.RESULT), (FREED_ALL, EVERYONE, Kind.FREED)),
            (FREED_WORKER, asker, Kind.FREED),
        ):
            if verdict & bit:
                yield self._answer(self._made(marked, kind), to)

    def _made(self, marked, kind):
        slot, odd = int(marked["slot"]), int(marked["round"]) % 2
        versions, values = self.state()
        version = versions[slot, odd]
        row = blank(1, self.elements)
        header = row["header"]
        header["kind"], header["flags"] = kind, version["flags"]
        header["slot"], header["round"] = slot, version["round"]
        header["bitmap"], header["job"] = version["seen"], self.job.number
        row["values"] = 0
        if kind == Kind.RESULT:
            header["exponent"] = version["exponent"]
            header["elements"] = count = int(version["elements"])
            row["values"][0, :count] = values[slot, odd, :count]
        self.seal.sign(row)
        return row

    def _answer(self, packet, to):
        return Outgoing(packet, np.array([to]))

    def _check_last(self, data, verdict, last):
        """What `answer` makes of a marked datagram is, in the end, the last of its answers."""
        before = self.kernel.counts()["datagrams out"]
        result, made, _ = self.kernel.objects.run("answer", data)
        # A worker that has sent nothing that counted has no way back: it will ask by itself.
        led = self.kernel.counts()["datagrams out"] > before
        to = int(last.to[0])
        if not verdict & (ALL | FREED_ALL) and (to == NEXT or 0 <= to < 64):
            assert result == REDIRECTED
        else:
            assert result in (REDIRECTED, LOST)
        whole = HEADERS + int(sizes(last.packets)[0])
        assert len(made) == whole
        wanted = last.packets.tobytes()[: whole - HEADERS]
        if result == REDIRECTED or verdict & (ALL | FREED_ALL):
            assert made[HEADERS:] == wanted
        assert led or result != REDIRECTED
        if led and (result == REDIRECTED or verdict & (ALL | FREED_ALL)):
            assert checksum(made[14:34]) == 0
            assert struct.unpack(">H", made[16:18])[0] == whole - 14
            assert made[26:30] == bytes(map(int, HOST.split(".")))
            assert struct.unpack(">2H", made[34:36] + made[38:40]) == (PORT, whole - 34)


class TwinSlots(Slots):
    """Slots of user space, beside which the kernel's do the same: else it fails."""

    def __init__(self, memory, workers, *, kernel, numbers):
        super().__init__(memory, workers)
        self._memory_of_both = memory
        elements = memory.values.shape[2]
        self.twin = KernelSlots(kernel, next(numbers), self.slots, workers, elements)

    def take(self, packets):
        before = Counter(self.dropped)
        told = self.twin.kernel.counts()
        out = super().take(packets)
        twin = self.twin.take(packets)
        assert described(out) == described(twin)
        counted = self.twin.kernel.counts() - told
        dropped = Counter(
            {
                word.removeprefix("dropped: "): count
                for word, count in counted.items()
                if word.startswith("dropped: ") and word != "dropped: for nobody"
            }
        )
        assert dropped == self.dropped - before
        return out

    def check_state(self):
        """Both hold the same."""
        versions, values = self.twin.state()
        memory = self._memory_of_both
        for name, column in (
            *(("round", memory.rounds), ("seen", memory.seen), ("over", memory.over)),
            *(("flags", memory.flags), ("exponent", memory.exponents)),
            ("elements", memory.elements),
        ):
            used = self.used()
            assert (versions[name][used] == column[used]).all(), name
        for slot, odd in np.argwhere(self.used()[:, None] & (memory.rounds >= 0)):
            count = int(memory.elements[slot, odd])
            mine = memory.values[slot, odd, :count]
            assert (values[slot, odd, :count] == mine).all()

    def used(self):
        """Which slots the job has used: others are made its own when it does."""
        serials = [self.twin.kernel.slots.read(place) for place in self.twin.job.lease]
        mine = max(int(one["serial"][0]) for one in serials)
        known = self.twin.kernel.serial(self.twin.job)
        return np.array([int(one["serial"][0]) == known for one in serials]) & bool(
            mine
        )


def described(out):
    """What is sent to whom, in an order of its own."""
    rows = []
    for packet, to in zip(out.packets, out.to.tolist(), strict=True):
        header = packet["header"]
        fields = ("kind", "flags", "elements", "slot", "round", "exponent", "bitmap")
        values = packet["values"][: header["elements"]].tolist()
        rows.append((to, *(int(header[field]) for field in fields), tuple(values)))
    return sorted(rows)
