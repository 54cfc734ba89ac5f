"""The values of the kernel's maps, as `layout.h` has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.aggregator.packets import HEADER_BYTES, MOST_WORKERS, TAG_BYTES

HEADER_WORDS = (HEADER_BYTES - TAG_BYTES) // 4
END = np.dtype([("address", ">u4"), ("port", ">u2"), ("unused", "<u2"), ("mac", "<u8")])
CONFIG = np.dtype(
    [("cookie", "<u8"), ("address", ">u4"), ("port", ">u2"), ("unused", "<u2")]
)
VERSION = np.dtype(
    [
        *(("round", "<i8"), ("seen", "<u8"), ("elements", "<u2")),
        *(("exponent", "<i2"), ("flags", "u1"), ("over", "u1"), ("unused", "<u2")),
    ]
)
COUNT = np.dtype("<u8")
COUNTS = (
    "datagrams in",
    "bytes in",
    "contributions",
    "sums out",
    "datagrams out",
    "dropped: truncated",
    "dropped: of an unknown kind",
    "dropped: too long for its job",
    "dropped: forged",
    "dropped: beyond the lease",
    "dropped: out of place",
    "dropped: of no worker",
    "dropped: late",
    "dropped: early",
    "dropped: disagreeing",
    "dropped: repeated",
    "dropped: overlapping",
    "dropped: received again",
    "dropped: wanted in vain",
    "dropped: of a job that has ended",
    "dropped: for nobody",
    "not sent: no way known yet",
    "dropped: merged on the way in",
)
"""What the kernel's programs count, by word."""


def room(elements: int) -> int:
    """The values of a version of a slot."""
    return (elements + 7) // 8 * 8


def job_type(elements: int) -> np.dtype[Any]:
    """A job, where datagrams have at most so many *elements*."""
    return np.dtype(
        [
            *(("serial", "<u8"), ("all", "<u8"), ("first", "<u4"), ("slots", "<u4")),
            *(("elements", "<u4"), ("agents", "<u4"), ("key", "u1", (32,))),
            *(("workers", END, (MOST_WORKERS,)), ("next", END, (MOST_WORKERS,))),
            ("multipliers", "<u8", (HEADER_WORDS + room(elements), 2)),
        ]
    )


def slot_type(elements: int) -> np.dtype[Any]:
    """A slot, likewise."""
    return np.dtype(
        [
            *(("lock", "<u4"), ("unused", "<u4"), ("serial", "<u8")),
            *(("versions", VERSION, (2,)), ("values", "<u4", (2, room(elements)))),
        ]
    )
