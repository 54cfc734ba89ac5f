"""One trace of ours and of `torch.profiler`'s, on one clock: for one view in Perfetto.

Each trace says when its time 0 was (`trace.BASE`), so events are moved by the difference. Processes
and flows have numbers that are a file's own, as the profiler calls its GPUs 0, 1, ...: here they get new
ones.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.tools.report.traces import BASE, trace_of

_GZIP = b"\x1f\x8b"
_FIRST_PROCESS = 1_000_000
"""Workers are processes 0, 1, ...; those of profilers count from here."""
_ROWS_PER_WORKER = 1000

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A file: its *events*, when its time 0 was, and of which worker it is, if it says so."""

    path: Path
    base: int
    events: list[Event]
    rank: int | None = None

    @property
    def seconds(self) -> tuple[float, float]:
        """When its first event began and its last one ended, since 1970."""
        timed = [one for one in self.events if one.get("ph") == "X"]
        begin = min((one["ts"] for one in timed), default=0.0)
        end = max((one["ts"] + one["dur"] for one in timed), default=0.0)
        return self.base / 1e9 + begin / 1e6, self.base / 1e9 + end / 1e6


def merge_traces(ours: Path, theirs: Sequence[Path], output: Path) -> list[Trace]:
    """Write *output*: what is in *ours*, a trace of a real or an emulated run's records, and in
    *theirs*, traces of `torch.profiler` made in that run. Returns all of them, ours first.

    Raises `UsageError` for what is no such trace, and for one of another time.
    """
    mine = _read(ours)
    workers = {one["pid"] for one in mine.events}
    began, ended = mine.seconds
    others = [_read(path) for path in theirs]
    for one in others:
        start, end = one.seconds
        if end < began or start > ended:
            raise UsageError(
                f"{one.path} was not recorded during {ours}: it begins "
                f"{start - began:+.3f} s from where that begins, which lasts "
                f"{ended - began:.3f} s. Are both of the same run?"
            )
    events = itertools.chain(_ours(mine), _theirs(others, mine.base, workers))
    try:
        with output.open("wb") as file:
            file.writelines(trace_of(events, mine.base))
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
    return [mine, *others]


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _File(msgspec.Struct):
    """What is read of a trace."""

    traceEvents: list[Event]  # noqa: N815 - the format's
    baseTimeNanoseconds: int | None = None  # noqa: N815
    distributedInfo: _Distributed = msgspec.field(default_factory=_Distributed)  # noqa: N815


def _read(path: Path) -> Trace:
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
        found = msgspec.json.decode(data, type=_File)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise UsageError(
            f"cannot read {path}: {error}. Was what wrote it killed?"
        ) from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no Chrome trace: {error}") from None
    if found.baseTimeNanoseconds is None:
        raise UsageError(
            f"{path} does not say when it was recorded (no {BASE}): expected a trace of "
            "paceline run or emulate --records, and those of torch.profiler. In virtual time "
            "no profiler's clock runs"
        )
    rank = found.distributedInfo.rank
    return Trace(path, found.baseTimeNanoseconds, found.traceEvents, rank)


def _ours(trace: Trace) -> Iterator[Event]:
    yield from trace.events
    for worker in sorted({one["pid"] for one in trace.events}):
        yield _sorted(worker, _ROWS_PER_WORKER * worker)


def _theirs(traces: Sequence[Trace], base: int, workers: set[int]) -> Iterator[Event]:
    processes, flows = itertools.count(_FIRST_PROCESS), itertools.count(1)
    for number, trace in enumerate(traces):
        rank = trace.rank
        if rank is None and len(workers) == 1:
            (rank,) = workers
        whose = f"profiler {number}" if rank is None else f"worker {rank}"
        after = len(workers) + number if rank is None else rank
        moved = _Moved((trace.base - base) / 1e3, processes, flows)
        yield from moved.events(trace.events)
        for place, (process, new) in enumerate(moved.processes.items(), start=1):
            name = moved.names.get(process, process)
            yield {
                "ph": "M",
                "name": "process_name",
                "pid": new,
                "tid": 0,
                "args": {"name": f"{whose}: {name}"},
            }
            yield _sorted(new, _ROWS_PER_WORKER * after + place)


@dataclass
class _Moved:
    """Events of one file, *later* by so many microseconds, with numbers of their own."""

    later: float
    new_processes: Iterator[int]
    new_flows: Iterator[int]
    processes: dict[Any, int] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    _flows: dict[Any, int] = field(default_factory=dict)

    def events(self, events: Iterable[Event]) -> Iterator[Event]:
        """Without those that name processes and put them in order."""
        for event in events:
            process = event.get("pid")
            if process not in self.processes:
                self.processes[process] = next(self.new_processes)
            kind = event.get("name") if event.get("ph") == "M" else None
            if kind == "process_name":
                self.names[process] = f"{event['args']['name']} {process}"
            elif kind != "process_sort_index":
                yield self._event(event)

    def _event(self, event: Event) -> Event:
        changed = {**event, "pid": self.processes[event.get("pid")]}
        if "ts" in event:
            changed["ts"] = round(event["ts"] + self.later, 3)
        if "id" in event:
            key = event.get("cat"), event["id"]
            if key not in self._flows:
                self._flows[key] = next(self.new_flows)
            changed["id"] = self._flows[key]
        return changed


def _sorted(process: int, place: int) -> Event:
    return {
        "ph": "M",
        "name": "process_sort_index",
        "pid": process,
        "tid": 0,
        "args": {"sort_index": place},
    }
