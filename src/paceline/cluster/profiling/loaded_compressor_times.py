"""What codes take where all cores have such work, measured by several processes at once.

A core that works alone is faster than one beside which others do: they share a cache, the memory
and its bus, the power, and may be two threads of one core. Workers that share a machine code at the
same time, as their gradients are ready at the same time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from statistics import fmean
from threading import Barrier, BrokenBarrierError

from paceline.cluster.profiling.compressors import coding_times
from paceline.cluster.profiling.gradient_dump import KeptGradients
from paceline.cluster.workload import CodingTimes
from paceline.compression import make
from paceline.runtimes.python_internals import end_pool
from paceline.timeouts import timeouts
from paceline.transport.liveness import end_with_parent, without_interrupts

_together: Barrier | None = None
"""Of all processes of the pool, in each of them."""


def coding_times_of_busy(
    codes: Sequence[str], folder: str, processes: int
) -> dict[str, CodingTimes]:
    """What each of *codes*, specs of compressors, takes for the first gradient that was kept in
    *folder*, on so many cores at the same time: means over these. Raises `UsageError` as
    `coding_times` does. Only this library's compressors are known in other processes."""
    # A fork of a process with threads, as torch's autograd engine has, can hang.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(barrier,)
    )
    try:
        with without_interrupts():
            asked = [
                pool.submit(_measure, tuple(codes), folder) for _ in range(processes)
            ]
        found = [one.result() for one in asked]
    finally:
        end_pool(pool)
    return {full: _mean([times[full] for times in found]) for full in found[0]}


def _begin(barrier: Barrier) -> None:
    global _together
    _together = barrier
    end_with_parent()


def _measure(codes: Sequence[str], folder: str) -> dict[str, CodingTimes]:
    """Code by code, each when all are there; alone, once another has failed, or does not come."""
    assert _together is not None
    kept = KeptGradients(folder)
    found: dict[str, CodingTimes] = {}
    try:
        for code in codes:
            with suppress(BrokenBarrierError):
                _together.wait(timeouts.busy_processes)
            found |= coding_times([make(code)], kept, usual=True)
    except BaseException:
        _together.abort()  # nobody waits for this one, whose error is the one to tell
        raise
    return found


def _mean(times: Sequence[CodingTimes]) -> CodingTimes:
    return CodingTimes(
        encode=fmean(one.encode for one in times),
        decode=fmean(one.decode for one in times),
        decode_per_worker=fmean(one.decode_per_worker for one in times),
    )
