"""Something that all workers do, and that goes wrong on all of them if on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from paceline.core.sync import gather_bytes
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Runtime

T = TypeVar("T")


class _Fault(msgspec.Struct, frozen=True, array_like=True):
    """What has gone wrong on a rank, if anything; *usage*: it was the caller's fault."""

    failed: bool = False
    usage: bool = False
    words: str = ""


def together(runtime: Runtime, what: str, attempt: Callable[[], T]) -> T:
    """Do *attempt* on every worker, and return when all have done it. Where it fails on
    one, all raise: nobody is left alone in the collective that comes next. Where workers
    meet only at their servers each does it by itself."""
    if runtime.alone:
        return attempt()
    result: list[T] = []
    fault: Exception | None = None
    try:
        result.append(attempt())
    except Exception as error:
        fault = error
    mine = _Fault()
    if fault is not None:
        usage, words = isinstance(fault, UsageError), f"{type(fault).__name__}: {fault}"
        mine = _Fault(True, usage, words)
    device = next(runtime.job.trainings[-1].model.parameters()).device
    everyone = gather_bytes(msgspec.msgpack.encode(mine), device)
    if fault is not None:
        raise fault
    for rank, encoded in enumerate(everyone):
        theirs = msgspec.msgpack.decode(encoded, type=_Fault)
        if theirs.failed:
            kind = UsageError if theirs.usage else PacelineError
            raise kind(f"{what} failed on rank {rank}: {theirs.words}")
    return result[0]
