"""Spans as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

A process row per worker; in it a row for computing, one for waiting, and one per lane of
each communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from paceline.instruments import Span

_FIRST = ("compute", "wait")


def chrome_trace(spans: Callable[[], Iterable[Span]]) -> Iterator[bytes]:
    """The trace event format's JSON object, in pieces; times in microseconds from the first
    span. *spans* gives them all, each time that it is called."""
    encode = msgspec.json.Encoder().encode
    yield b'{"traceEvents":['
    comma = b""
    for event in _events(spans):
        yield comma + encode(event)
        comma = b","
    yield b'],"displayTimeUnit":"ms"}'


def _events(spans: Callable[[], Iterable[Span]]) -> Iterator[dict[str, Any]]:
    origin = min((span.start for span in spans()), default=0.0)
    rows: dict[tuple[int, str], int] = {}
    for span in spans():
        key = (span.worker, span.row)
        if key not in rows:
            rows[key] = len(rows)
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.row,
            "pid": span.worker,
            "tid": rows[key],
            "ts": round((span.start - origin) * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
        }
    for worker in sorted({worker for worker, _ in rows}):
        yield _name("process_name", worker, 0, f"worker {worker}")
    for (worker, row), thread in rows.items():
        yield _name("thread_name", worker, thread, row)
        order = _FIRST.index(row) if row in _FIRST else len(_FIRST) + thread
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": worker,
            "tid": thread,
            "args": {"sort_index": order},
        }


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": thread,
        "args": {"name": text},
    }
