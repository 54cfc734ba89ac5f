"""One step of a run from its spans: the activities of a few workers over time.

Its size is bounded, whatever the numbers of workers, tensors and messages. It has four workers, the busiest rows of
each, and joins neighbouring spans that are too short to be seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Literal

import msgspec

from paceline.records import STEP_ROW, Span, StepRecord, steady_steps
from paceline.units import show_seconds

MOST_WORKERS = 4
MOST_ROWS = 12
"""Rows of a worker."""
MOST_SPANS = 4000
"""Spans of a step."""
LOOKED_AT = 32
"""Steps at a run's end among which one is chosen."""
TICKS = 100_000
"""Time units of a step: times are whole numbers of them."""
SEEN = TICKS / 2000
"""A shorter span is less than a pixel."""

Kind = Literal["compute", "message", "wait"]
Spans = Callable[[], Iterable[Span]]


class Row(msgspec.Struct, frozen=True):
    """One worker's activities of one kind.

    *spans* has three numbers for each activity: the ticks since the start of the previous one, the length
    in ticks, and the number of its name.
    """

    name: str
    kind: Kind
    spans: tuple[int, ...]


class Worker(msgspec.Struct, frozen=True):
    """A worker's rows, and its compute and wait seconds in the step."""

    name: str
    compute_seconds: float
    wait_seconds: float
    rows: tuple[Row, ...]


class Step(msgspec.Struct, frozen=True):
    """A step of the run *name*: *what* identifies the step, *names* are those of all spans."""

    name: str
    what: str
    seconds: float
    workers: tuple[Worker, ...]
    names: tuple[str, ...]


def typical_step(
    name: str, spans: Spans, records: Sequence[StepRecord], most: int = MOST_SPANS
) -> Step | None:
    """Cut a typical step out of a run.

    Args:
        name: The run.
        spans: Returns all spans of the run, on each call.
        records: Its steps.
        most: Spans of the result at most.

    Returns:
        The step, between the ends of worker 0's steps; None if no trace contains it.
    """
    first = min((record.worker for record in records), default=0)
    mine = [record for record in records if record.worker == first]
    if not mine:
        return None
    chosen = typical_record(mine)
    label = f"step {chosen.step}"
    window = next(
        (
            (span.start, span.end)
            for span in spans()
            if span.row == STEP_ROW and span.worker == first and span.name == label
        ),
        None,
    )
    if window is None or window[1] <= window[0]:
        return None
    by_worker = _within(spans(), *window)
    names: dict[str, int] = {}
    kept = _chosen_workers(by_worker)
    workers = [
        _worker(worker, by_worker[worker], window, names, most // len(kept))
        for worker in kept
    ]
    everybody = len({record.worker for record in records})
    return Step(
        name=name,
        what=_what(chosen, mine, len(kept), everybody),
        seconds=window[1] - window[0],
        workers=tuple(workers),
        names=tuple(names),
    )


def typical_record(records: Sequence[StepRecord]) -> StepRecord:
    """Choose a typical step of one worker: the median of the late steps with the most common number of bytes.

    They are steady steps if there are any; the last step is left out.
    """
    records = steady_steps(records)
    count = max(3, min(LOOKED_AT, len(records) // 2))
    late = list(records[-count:-1])
    if not any(record.bytes_sent for record in late):
        late = list(records[:-1]) or list(records)
    amounts = Counter(_about(r.bytes_sent) for r in late if r.bytes_sent)
    usual = max(amounts, key=lambda amount: (amounts[amount], amount), default=0.0)
    mine = [record for record in late if _about(record.bytes_sent) == usual]
    middle = median_low(record.step_seconds for record in mine)
    return next(r for r in reversed(mine) if r.step_seconds == middle)


def _about(amount: float) -> float:
    return float(f"{amount:.2g}")


def _what(
    chosen: StepRecord, records: Sequence[StepRecord], kept: int, everybody: int
) -> str:
    text = (
        f"step {chosen.step} of {records[-1].step}, {show_seconds(chosen.step_seconds)}"
    )
    if any(r.bytes_sent < 0.5 * chosen.bytes_sent for r in records[-LOOKED_AT:-1]):
        text += ", in which more is sent than in some others"
    return text if kept == everybody else f"{text}; {kept} of {everybody} workers"


def _within(
    spans: Iterable[Span], start: float, end: float
) -> dict[int, list[tuple[Span, Kind]]]:
    found: dict[int, list[tuple[Span, Kind]]] = {}
    for span in spans:
        if span.end <= start or span.start >= end or span.row in (STEP_ROW, "rules"):
            continue
        kind: Kind = "message"
        if span.row in ("compute", "wait"):
            kind = "compute" if span.row == "compute" else "wait"
        cut = span._replace(start=max(start, span.start), end=min(end, span.end))
        found.setdefault(span.worker, []).append((cut, kind))
    return found or {0: []}


def _chosen_workers(by_worker: dict[int, list[tuple[Span, Kind]]]) -> list[int]:
    """Return the first and the last worker, and those that wait least and most.

    The others may wait for the one that waits least.
    """
    workers = sorted(by_worker)
    if len(workers) <= MOST_WORKERS:
        return workers
    waits = {
        worker: sum(s.end - s.start for s, kind in by_worker[worker] if kind == "wait")
        for worker in workers
    }
    least, most = (
        min(workers, key=waits.__getitem__),
        max(workers, key=waits.__getitem__),
    )
    wanted = [workers[0], least, most, workers[-1], *workers[1:]]
    return sorted(list(dict.fromkeys(wanted))[:MOST_WORKERS])


def _worker(
    number: int,
    spans: Sequence[tuple[Span, Kind]],
    window: tuple[float, float],
    names: dict[str, int],
    most: int,
) -> Worker:
    start, end = window
    rows: dict[tuple[str, Kind], list[Span]] = {}
    for span, kind in spans:
        rows.setdefault((span.row, kind), []).append(span)
    for mine in rows.values():
        mine.sort(key=lambda span: (span.start, span.end))
    waits = rows.get(("wait", "wait"), [])
    if ("compute", "compute") not in rows:
        # A real worker records its waits; it computes in between.
        rows["compute", "compute"] = _between(waits, number, start, end)
    scale = TICKS / (end - start)
    laid = []
    for (row, kind), mine in rows.items():
        for i, lane in enumerate(_side_by_side(mine, 1 / scale)):
            ticks = [_ticks(span, start, scale, names) for span in lane]
            name = row_name(row)
            laid.append((f"{name} ({i + 1})" if i else name, kind, ticks))
    order = {"compute": 0, "wait": 1, "message": 2}
    laid.sort(key=lambda one: (order[one[1]], one[0]))
    messages = [one for one in laid if one[1] == "message"]
    messages.sort(key=lambda one: -sum(length for _, length, _ in one[2]))
    kept = [one for one in laid if one[1] != "message" or one in messages[:MOST_ROWS]]
    joined = _joined([ticks for _, _, ticks in kept], names, most)
    return Worker(
        name=f"worker {number}",
        compute_seconds=_covered(rows["compute", "compute"]),
        wait_seconds=_covered(waits),
        rows=tuple(
            Row(row, kind, _flat(ticks))
            for (row, kind, _), ticks in zip(kept, joined, strict=True)
        ),
    )


def _between(
    waits: Sequence[Span], worker: int, start: float, end: float
) -> list[Span]:
    ends = [start, *(wait.end for wait in waits)]
    starts = [*(wait.start for wait in waits), end]
    return [
        Span(worker, "compute", "between waits", a, b)
        for a, b in zip(ends, starts, strict=True)
        if b > a
    ]


def _covered(spans: Sequence[Span]) -> float:
    """Return the seconds covered by at least one of the *spans*, which are sorted by start."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _side_by_side(spans: Sequence[Span], least: float) -> list[list[Span]]:
    """Put spans that overlap by more than *least* seconds into separate lines."""
    lines: list[list[Span]] = []
    for span in spans:
        for line in lines:
            if line[-1].end <= span.start + least:
                line.append(span)
                break
        else:
            lines.append([span])
    return lines


Ticks = tuple[int, int, int]


def _ticks(span: Span, start: float, scale: float, names: dict[str, int]) -> Ticks:
    begins = round((span.start - start) * scale)
    ends = round((span.end - start) * scale)
    return begins, ends - begins, names.setdefault(called(span.name), len(names))


_CALL = re.compile(r"(\w+)(?:\(.*\))?((?:, .*?)?)(?: sent)?")
_TRAINING = re.compile(r"\btraining \d+,? ?")
_LANE = re.compile(r"(?:(.*) )?lane (\d+)")
_OPERATIONS = {"perform": "collective", "chained": "wait for a chained collective"}
_GROUPS = {"world": "channel", "after": "chained channel"}


def row_name(row: str) -> str:
    """Format ``training 0, after training 0 lane 1`` as ``chained channel 1``: a step has one training."""
    text = _TRAINING.sub("", row) or row
    found = _LANE.fullmatch(text)
    if found is None:
        return text
    group = found[1] or "world"
    return f"{_GROUPS.get(group, group)} {found[2]}"


def called(name: str) -> str:
    """Format ``all_reduce(SUM, float32[8]), 32 B sent`` as ``all-reduce, 32 B``."""
    found = _CALL.fullmatch(name)
    if found is None:
        return name
    operation = _OPERATIONS.get(found[1], found[1].replace("_", "-"))
    return f"{operation}{found[2]}"


def _joined(
    rows: list[list[Ticks]], names: dict[str, int], most: int
) -> list[list[Ticks]]:
    """Join neighbouring spans until there are at most *most* in all, or one in each row.

    Those that look the same are joined first.
    """
    shortest = SEEN / 8
    while sum(map(len, rows)) > most and shortest < TICKS:
        shortest *= 2
        rows = [_join(row, shortest, names) for row in rows]
    return rows


def _join(row: list[Ticks], shortest: float, names: dict[str, int]) -> list[Ticks]:
    several = names.setdefault("several, too short to be shown", len(names))
    found: list[Ticks] = []
    for begins, length, name in row:
        if found:
            before, was, _ = found[-1]
            gap = begins - before - was
            if gap <= shortest and (length <= shortest or was <= shortest):
                found[-1] = (before, begins + length - before, several)
                continue
        found.append((begins, length, name))
    return found


def _flat(ticks: Sequence[Ticks]) -> tuple[int, ...]:
    begins = [0, *(begins for begins, _, _ in ticks)]
    steps = [after - before for before, after in pairwise(begins)]
    return tuple(
        number
        for step, (_, length, name) in zip(steps, ticks, strict=True)
        for number in (step, length, name)
    )
