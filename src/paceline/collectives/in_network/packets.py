"""Datagrams between workers and an aggregator: one header, then int32 values.

Layout (little-endian, `HEADER`)
--------------------------------
====== ======== ===== ==================================================================
offset field    bytes what
====== ======== ===== ==================================================================
0      tag      8     of all that follows, by the job's key: see `Seal`
8      magic    4     `MAGIC`: this protocol and its version
12     kind     1     see `Kind`
13     flags    1     see `Flag`
14     elements 2     how many values follow: none is a contribution of zeros
16     job      4     the aggregator's number of the job
20     slot     4     of the job's lease
24     round    4     how often the slot was used before by this job
28     exponent 2     of a block that comes one batch later: see `fixed_point`
30     worker   2     who sends this, or is to have it; `NOBODY`: no worker
32     bitmap   8     bit w: worker w's contribution is in it
40     values   4 k   int32
====== ======== ===== ==================================================================

A datagram has exactly as many bytes as its header says. What is shorter, longer, foreign,
forged or of an unknown kind is dropped and counted, and never answered.

A batch is an array of `packet_type(k)`: rows of one length, of which a datagram is the first
part. So headers are columns, and values a matrix.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError

Array = npt.NDArray[Any]

MAGIC = 0x314C4350
"""``PCL1``."""
HEADER = np.dtype(
    [
        *(("tag", "<u8"), ("magic", "<u4"), ("kind", "u1"), ("flags", "u1")),
        *(("elements", "<u2"), ("job", "<u4"), ("slot", "<u4"), ("round", "<u4")),
        *(("exponent", "<i2"), ("worker", "<u2"), ("bitmap", "<u8")),
    ]
)
HEADER_BYTES = HEADER.itemsize
TAG_BYTES = 8
NOBODY = 0xFFFF
MOST_WORKERS = 64
"""Bits of the bitmap."""
IP_BYTES, IP6_BYTES, UDP_BYTES = 20, 40, 8
LARGEST_DATAGRAM = 65507
_WORDS_A_DIGEST = 4
"""For which one digest of 64 bytes has multipliers."""
FEWEST_ELEMENTS = 16
"""A datagram with fewer would be mostly headers."""


class Kind(enum.IntEnum):
    """What a datagram is."""

    CONTRIBUTION = 1
    """To the aggregator: a worker's values; or, to a server, those of several."""
    RESULT = 2
    """From it: the sum."""
    FREED = 3
    """From it: the sum has reached the next agent, the slot may be used again."""
    RECEIVED = 4
    """To it, from the next agent: the sum is here."""
    WANTED = 5
    """To it: send the sum again."""
    PARAMETERS = 6
    """From a server: the sum, for all workers or for one; to aggregators, which pass it on."""
    PROBE = 7
    """To it, and back to the same worker: whether datagrams of this size get through."""


_FIRST_KIND, _LAST_KIND = int(min(Kind)), int(max(Kind))


class Flag(enum.IntFlag):
    """How a datagram is to be dealt with."""

    FORWARD = 1
    """The sum is for the next agent, not for the workers."""
    REPEATED = 2
    """It was sent before, and may have been lost."""
    COLLIDED = 4
    """Its slot was another's, so it was not added up."""
    ONWARD = 8
    """The sum is for the workers, and for the next agent as well."""


LOCAL = Flag(0)
"""The sum is for the workers."""
MODES = Flag.FORWARD | Flag.ONWARD


@lru_cache(maxsize=64)
def packet_type(elements: int) -> np.dtype[Any]:
    """Rows of a header and of *elements* values."""
    return np.dtype([("header", HEADER), ("values", "<i4", (elements,))])


def blank(count: int, elements: int) -> Array:
    """*count* rows whose headers are zeros but for what each needs; values are undefined."""
    rows = np.empty(count, packet_type(elements))
    rows["header"] = np.zeros((), HEADER)
    rows["header"]["magic"] = MAGIC
    rows["header"]["worker"] = NOBODY
    return rows


def sizes(packets: Array) -> Array:
    """Bytes of each datagram."""
    return np.asarray(HEADER_BYTES + 4 * packets["header"]["elements"].astype(np.int64))


def elements_for(mtu: int, *, ip_bytes: int = IP_BYTES) -> int:
    """How many values a datagram may have where packets have at most *mtu* bytes.

    Even, so that headers of a batch lie on multiples of 8. Raises `UsageError` where there
    is room for too few.
    """
    room = min(mtu - ip_bytes - UDP_BYTES, LARGEST_DATAGRAM) - HEADER_BYTES
    elements = room // 8 * 2
    if elements < FEWEST_ELEMENTS:
        least = ip_bytes + UDP_BYTES + HEADER_BYTES + 4 * FEWEST_ELEMENTS
        raise UsageError(
            f"MTU {mtu}: expected {least} bytes or more, so that a packet holds "
            f"{FEWEST_ELEMENTS} values behind its headers; Ethernet has 1500"
        )
    return elements


def mtu_for(elements: int, *, ip_bytes: int = IP_BYTES) -> int:
    """The smallest MTU that lets a datagram of *elements* values pass unfragmented."""
    return ip_bytes + UDP_BYTES + HEADER_BYTES + 4 * elements


def well_formed(packets: Array, lengths: Array, dropped: Counter[str]) -> Array:
    """Which rows are datagrams of this protocol, by what they say of themselves; the others
    are counted in *dropped*. *lengths*: how many bytes came, or -1 where more came than a row
    can hold. Reads of each row no more than came."""
    header = packets["header"]
    whole = lengths >= HEADER_BYTES
    ours = whole & (header["magic"] == MAGIC)
    known = ours & (header["kind"] >= _FIRST_KIND) & (header["kind"] <= _LAST_KIND)
    fits: Array = known & (sizes(packets) == lengths)
    for word, passed, left in (
        ("truncated", np.ones_like(whole), whole),
        ("foreign", whole, ours),
        ("of an unknown kind", ours, known),
        ("truncated", known, fits),
    ):
        count = int(np.count_nonzero(passed & ~left))
        if count:
            dropped[word] += count
    return fits


class Seal:
    """What makes a job's datagrams known as genuine: a tag that only who has its key can make.

    The 32-bit words m_i behind the tag are hashed, then the hash is made unpredictable (Carter
    and Wegman, 1981)::

        h_k = sum of m_i a_ik modulo 2^64, k = 1, 2     a_ik: secret, uniform 64-bit numbers
        tag = BLAKE2s of 8 bytes (key of 32 bytes, h_1, h_2)

    Two datagrams that differ share h_k with a chance of 2^-33 at most (the worst is one word that
    differs by 2^31), and both with 2^-66, which is less than a tag of 64 bits is guessed
    by. What is left for BLAKE2s is one block. Here sums of a whole batch are one product of
    matrices.

    Replays are no matter of the tag: a datagram that comes again, at any time, is one that the
    protocol deals with by its round. It hides nothing: sums are formed of what the aggregator
    can read.
    """

    def __init__(self, key: bytes) -> None:
        """*key*: 16 to 64 bytes."""
        if not 16 <= len(key) <= 64:
            raise ValueError(f"expected a key of 16 to 64 bytes, got {len(key)}")
        self._key = key
        self.last_key = hashlib.blake2b(b"tag", key=key, digest_size=32).digest()
        """Of the last step."""
        self._multipliers = np.empty((0, 2), "<u8")

    def multipliers(self, words: int) -> Array:
        """The a_ik of so many words: of more words, the first ones are the same."""
        if len(self._multipliers) < words:
            count = -(-words // _WORDS_A_DIGEST)
            digests = (
                hashlib.blake2b(b"words %d" % number, key=self._key).digest()
                for number in range(count)
            )
            self._multipliers = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        return self._multipliers[:words]

    def sign(self, packets: Array) -> None:
        """Write the tags of *packets*, whose rows follow each other in memory."""
        packets["header"]["tag"] = self._tags(packets)

    def genuine(self, packets: Array) -> Array:
        """Which of *packets*, all `well_formed`, have the right tag."""
        return np.asarray(packets["header"]["tag"] == self._tags(packets))

    def _tags(self, packets: Array) -> Array:
        if not len(packets):
            return np.empty(0, "<u8")
        words = packets.view("<u4").reshape(len(packets), -1)[:, TAG_BYTES // 4 :]
        hashed = self._hashed(words, sizes(packets) // 4 - TAG_BYTES // 4).tobytes()
        key, blake2s = self.last_key, hashlib.blake2s
        tags = [
            blake2s(key + hashed[start : start + 16], digest_size=TAG_BYTES).digest()
            for start in range(0, len(hashed), 16)
        ]
        return np.frombuffer(b"".join(tags), "<u8")

    def _hashed(self, words: Array, counts: Array) -> Array:
        """h_1 and h_2 of each row of *words*, of which so many count."""
        sums = np.empty((len(words), 2), "<u8")
        shortest, longest = int(counts.min()), int(counts.max())
        if shortest == longest:
            by = self.multipliers(longest)
            return np.matmul(words[:, :longest].astype("<u8"), by, out=sums)
        for count in np.unique(counts):  # a few: whole ones, none, the last of a buffer
            rows = np.flatnonzero(counts == count)
            by = self.multipliers(int(count))
            sums[rows] = words[rows, : int(count)].astype("<u8") @ by
        return sums
