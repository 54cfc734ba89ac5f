"""A folder of records: per-step JSON lines and a trace, by each worker or for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.instruments import Journal, Span, StepRecord
from paceline.report.trace import chrome_trace


class WorkerFile(msgspec.Struct, kw_only=True):
    """What one real worker leaves for the launcher to merge."""

    steps: list[StepRecord]
    spans: list[Span]


def write_worker(folder: str, journal: Journal) -> None:
    """Leave one worker's records in *folder*."""
    content = WorkerFile(steps=journal.steps, spans=journal.spans)
    path = make_folder(folder) / f"worker-{journal.worker}.json"
    path.write_bytes(msgspec.json.encode(content))


def read_workers(folder: str) -> tuple[list[StepRecord], list[Span]]:
    """Merge, and remove, what all real workers have left in *folder*."""
    steps: list[StepRecord] = []
    spans: list[Span] = []
    for path in sorted(Path(folder).glob("worker-*.json")):
        content = msgspec.json.decode(path.read_bytes(), type=WorkerFile)
        steps += content.steps
        spans += content.spans
        path.unlink()
    steps.sort(key=lambda record: (record.step, record.worker))
    return steps, spans


def forget_workers(folder: str) -> None:
    """Remove what workers of an earlier run, that was killed, have left in *folder*."""
    for path in make_folder(folder).glob("worker-*.json"):
        path.unlink()


def write_run(
    folder: str, name: str, steps: Sequence[StepRecord], spans: Sequence[Span]
) -> None:
    """Write ``NAME.jsonl`` (a record per worker and step) and ``NAME.trace.json``."""
    path = make_folder(folder)
    (path / f"{name}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(steps))
    (path / f"{name}.trace.json").write_bytes(chrome_trace(spans))


def make_folder(folder: str) -> Path:
    """Make *folder* if need be; raises `UsageError` where nothing can be written there."""
    path = Path(folder)
    probe = path / f".paceline-probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write records to {folder}: {error}") from error
    return path
