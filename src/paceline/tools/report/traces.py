"""Spans as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Each worker has a process with a row for its steps, one for computing, one for waiting, and one per channel of each
communicator. Each event is one line, since traces may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.records import STEP_ROW, Span

_FIRST = (STEP_ROW, "compute", "wait")
_OPENS, _CLOSES = b'{"traceEvents":[', b'],"displayTimeUnit":"ms"}'


def chrome_trace(spans: Callable[[], Iterable[Span]]) -> Iterator[bytes]:
    """Yield a JSON object in the trace event format, in pieces.

    Times are in microseconds from the first span.

    Args:
        spans: Returns all spans, on each call.
    """
    origin = min((span.start for span in spans()), default=0.0)
    encode = msgspec.json.Encoder().encode
    yield _OPENS
    comma = b"\n"
    for event in _events(spans, origin):
        yield comma + encode(event)
        comma = b",\n"
    yield b"\n" + _CLOSES


class _Event(msgspec.Struct):
    """A line of a trace, with the fields of a span."""

    ph: str
    pid: int
    name: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


def read_spans(path: Path) -> Iterator[Span]:
    """Return the spans of a trace made by `chrome_trace`; times are in seconds from the first one."""
    decode = msgspec.json.Decoder(_Event).decode
    with path.open("rb") as lines:
        for line in lines:
            text = line.strip().removesuffix(b",")
            if text in (b"", _CLOSES) or text.endswith(_OPENS):
                continue
            event = decode(text)
            if event.ph == "X":
                start, end = event.ts / 1e6, (event.ts + event.dur) / 1e6
                yield Span(event.pid, event.cat, event.name, start, end)


def _events(
    spans: Callable[[], Iterable[Span]], origin: float
) -> Iterator[dict[str, Any]]:
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
