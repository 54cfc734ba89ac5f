"""A folder of records: per-step JSON lines and a trace, by each worker or for all."""

from __future__ import annotations

import os
import shutil
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


_CLAIMED = ".paceline-files"


def claim(folder: str, *names: str) -> None:
    """Note that the files with these *names* in *folder* are about to be made, so that
    `clear` may remove them. A folder that is there already stays somebody else's."""
    path = make_folder(folder)
    known = _claimed(path)
    fresh = [n for n in names if n not in known and not (path / n).is_dir()]
    (path / _CLAIMED).write_text("".join(f"{name}\n" for name in [*known, *fresh]))


def clear(folder: str) -> None:
    """Remove from *folder* what was claimed there, and nothing else."""
    path = make_folder(folder)
    for name in _claimed(path):
        if (path / name).is_dir() and not (path / name).is_symlink():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)
    (path / _CLAIMED).unlink(missing_ok=True)


def _claimed(path: Path) -> list[str]:
    try:
        names = (path / _CLAIMED).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [n for n in names if Path(n).name == n and n not in ("", ".", "..")]


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
