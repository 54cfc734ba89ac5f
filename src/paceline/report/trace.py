"""Spans as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

A process row per worker; in it a row for computing, one for waiting, and one per lane of
each communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.instruments import Span

_FIRST = ("compute", "wait")


def chrome_trace(spans: Sequence[Span]) -> bytes:
    """The trace event format's JSON object; times in microseconds from the first span."""
    origin = min((span.start for span in spans), default=0.0)
    rows: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        key = (span.worker, span.row)
        if key not in rows:
            rows[key] = len(rows)
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.row,
                "pid": span.worker,
                "tid": rows[key],
                "ts": round((span.start - origin) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
            }
        )
    for worker in sorted({worker for worker, _ in rows}):
        events.append(_name("process_name", worker, 0, f"worker {worker}"))
    for (worker, row), thread in rows.items():
        events.append(_name("thread_name", worker, thread, row))
        order = _FIRST.index(row) if row in _FIRST else len(_FIRST) + thread
        events.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": worker,
                "tid": thread,
                "args": {"sort_index": order},
            }
        )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": thread,
        "args": {"name": text},
    }
