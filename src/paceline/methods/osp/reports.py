"""What workers and servers tell each other, as bytes beside pushes and their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.errors import UsageError


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has seen of its steps. *ready*, per bucket, and *end* of backward: seconds
    since the last step; *start_up* of a message, and *per_byte* of the buckets' *bytes*;
    *whole*: seconds of a step. All times are 0, and *ready* is empty, where there were too
    few steps to tell. *part*: how much of the budget may be used."""

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
    found: Measured = _decoded("push", report, Measured)
    times = [*found.ready, found.end, found.start_up, found.per_byte, found.whole]
    if (
        len(found.ready) not in (0, buckets)
        or not all(0 <= number < math.inf for number in (*times, *found.bytes))
        or not 0 <= found.part <= 1
    ):
        raise UsageError(
            f"push: measured times, bytes or parts that make no sense: {found}"
        )
    return found


def written_mask(units: Sequence[int]) -> bytes:
    """The paper's GIB: the units that a server wants deferred, of those that it holds."""
    return msgspec.msgpack.encode(list(units)) if units else b""


def read_mask(words: bytes) -> list[int]:
    units: list[int] = _decoded("answer", words, list[int]) if words else []
    return units


def _decoded(what: str, data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{what}: bytes that osp cannot read: {error}") from None
