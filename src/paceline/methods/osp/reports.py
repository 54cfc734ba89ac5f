"""What workers and servers tell each other, as bytes beside pushes and their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.methods.osp.choice import Rate, StepTimes
from paceline.methods.osp.trial import Seen


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has seen of its steps. *ready*, per bucket, and *end* of backward: seconds
    since the last step, none where it has seen no step; *per_byte* of the buckets' *bytes*:
    what a message takes; *part*: how much of the budget may be used; *whole*: seconds
    of a step, or 0 if there were too few to tell."""

    ready: list[float]
    end: float
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
    numbers = [*found.ready, found.end, found.per_byte, found.whole, *found.bytes]
    if (
        len(found.ready) not in (0, buckets)
        or not all(0 <= number < math.inf for number in numbers)
        or not 0 <= found.part <= 1
    ):
        raise UsageError(
            f"push: measured times, bytes or parts that make no sense: {found}"
        )
    return found


def together(workers: tuple[int, ...], told: Sequence[Measured], mine: int) -> Seen:
    """What *workers* have told, for a server that has *mine* bytes of the model. A step is as
    long as the slowest one's. A server that holds a part of the model has that part of a
    bucket's messages, so that a byte of its own costs more."""
    times = None
    if told[0].ready and len({len(one.ready) for one in told}) == 1:
        ready = [max(ready) for ready in zip(*(one.ready for one in told), strict=True)]
        times = StepTimes(ready, max(one.end for one in told))
    per_byte = max(one.per_byte for one in told) * sum(told[0].bytes) / max(1, mine)
    known = all(one.whole for one in told)
    whole = max(one.whole for one in told) if known else 0.0
    return Seen(times, Rate(0.0, per_byte, pulls=True), whole, workers)


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
