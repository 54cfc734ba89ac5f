"""What OSP's workers and servers tell each other, as bytes beside pushes and their answers.

Workers report what they have `Measured`; servers tell which units of a bucket its next main
push is to leave out (the paper's GIB).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from paceline.errors import UsageError

T = TypeVar("T")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has seen of its steps. *ready*, per bucket, and *end* of backward:
    seconds since the last step; *start_up* of a message, and *per_byte* of the bucket's
    *bytes*; *part*: how much of the budget may be used; *whole*: seconds of a step, or 0 if
    there were too few to tell."""

    ready: list[float]
    end: float
    start_up: float
    per_byte: float
    bytes: list[int]
    part: float
    whole: float = 0.0


def written_report(measured: Measured) -> bytes:
    return msgspec.msgpack.encode(measured)


def read_report(report: bytes, buckets: int) -> Measured:
    """What a worker has written, whose model has so many *buckets*. Raises `UsageError` for
    bytes that are no `Measured`, and for numbers that make no sense."""
    measured = _decoded("push", report, Measured)
    numbers = [
        *measured.ready,
        measured.end,
        measured.start_up,
        measured.per_byte,
        measured.whole,
    ]
    if (
        len(measured.ready) not in (0, buckets)
        or not all(0 <= number < math.inf for number in numbers)
        or not all(size >= 0 for size in measured.bytes)
        or not 0 <= measured.part <= 1
    ):
        raise UsageError(
            f"push: measured times, bytes or parts that make no sense: {measured}"
        )
    return measured


def written_mask(units: Sequence[int]) -> bytes:
    """The numbers of the units that a server wants deferred, of those that it holds."""
    return msgspec.msgpack.encode(list(units)) if units else b""


def read_mask(words: bytes) -> list[int]:
    return _decoded("answer", words, list[int]) if words else []


def _decoded(what: str, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{what}: bytes that osp cannot read: {error}") from None
