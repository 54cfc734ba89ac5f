"""A folder of records: JSON lines per step, and a trace, by each worker or for all."""

from __future__ import annotations

import heapq
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline.errors import UsageError
from paceline.records import Span, StepRecord
from paceline.tools.report.traces import chrome_trace

_WORKERS = "worker-*.jsonl"
_PIECE = 1 << 16
"""Bytes that are read or written at once."""


class WorkerRecords:
    """A real worker's `RecordListener`: writes a file in *folder* that the launcher merges.

    The file has JSON lines: an object for a step and an array for a span. All records of a step are
    in the file at its end. Only the last line of a killed worker may be incomplete; the worker's
    next incarnation continues after the last complete line. *clock*: added to a span's times to get
    seconds since 1970.
    """

    def __init__(self, folder: str, clock: float = 0.0) -> None:
        self._folder, self._clock = folder, clock
        self._file: BinaryIO | None = None
        self._lines = bytearray()
        self._broken = False

    def step(self, record: StepRecord) -> None:
        self._add(record)
        self._write(record.worker)

    def span(self, span: Span) -> None:
        start, end = self._clock + span.start, self._clock + span.end
        self._add(span._replace(start=start, end=end))
        if len(self._lines) > _PIECE:
            self._write(span.worker)

    def close(self) -> None:
        """Write the last records and close the file."""
        if self._file is not None:
            self._write(0)
            self._file.close()

    def _add(self, line: StepRecord | Span) -> None:
        if not self._broken:
            self._lines += msgspec.json.encode(line) + b"\n"

    def _write(self, worker: int) -> None:
        """Write the records so far at once; a full disk does not end the training."""
        if self._broken:
            return
        try:
            if self._file is None:
                name = f"worker-{worker}.jsonl"
                self._file = _open_after_whole_lines(make_folder(self._folder) / name)
            if self._file.write(self._lines) < len(self._lines):
                raise OSError(f"the disk of {self._folder} is full")
        except (OSError, UsageError) as error:
            self._broken = True
            print(
                f"paceline: worker {worker}: no more records are written: {error}",
                file=sys.stderr,
            )
        self._lines.clear()


def _open_after_whole_lines(path: Path) -> BinaryIO:
    """Open a file to continue after its last complete line; unbuffered."""
    path.touch()
    with path.open("rb") as before:
        whole = sum(len(line) for line in before if line.endswith(b"\n"))
    os.truncate(path, whole)
    return path.open("ab", buffering=0)


def _lines_of(path: Path) -> Iterator[StepRecord | Span]:
    decode = msgspec.json.Decoder(StepRecord | Span).decode
    with path.open("rb", buffering=_PIECE) as lines:
        yield from (decode(line) for line in lines if line.endswith(b"\n"))


def _steps_of(path: Path) -> Iterator[StepRecord]:
    return (line for line in _lines_of(path) if isinstance(line, StepRecord))


def merge_workers(folder: str, name: str) -> None:
    """Merge all real workers' files in *folder* into ``NAME.jsonl`` and ``NAME.trace.json``, and remove them.

    They are read while the result is written, so their size does not matter.
    """
    paths = sorted(Path(folder).glob(_WORKERS))

    def spans() -> Iterator[Span]:
        lines = itertools.chain.from_iterable(map(_lines_of, paths))
        return (line for line in lines if isinstance(line, Span))

    steps = heapq.merge(*map(_steps_of, paths), key=_order)
    write_run(folder, name, steps, spans)
    for path in paths:
        path.unlink()


def forget_workers(folder: str) -> None:
    """Remove files in *folder* that workers of an earlier, killed run left."""
    for path in make_folder(folder).glob(_WORKERS):
        path.unlink()


def write_run(
    folder: str,
    name: str,
    steps: Iterable[StepRecord],
    spans: Callable[[], Iterable[Span]],
) -> None:
    """Write ``NAME.jsonl`` (a record per worker and step) and ``NAME.trace.json``."""
    path = make_folder(folder)
    encode = msgspec.json.Encoder().encode
    with (path / f"{name}.jsonl").open("wb", buffering=_PIECE) as file:
        file.writelines(encode(record) + b"\n" for record in steps)
    with (path / f"{name}.trace.json").open("wb", buffering=_PIECE) as file:
        file.writelines(chrome_trace(spans))


def _order(record: StepRecord) -> tuple[int, int]:
    return record.step, record.worker


_CLAIMED = ".paceline-files"


def claim(folder: str, *names: str) -> None:
    """Record that files with these *names* will be made in *folder*, so that `clear` may remove them.

    A folder that exists already is never claimed.
    """
    path = make_folder(folder)
    known = _claimed(path)
    fresh = [n for n in names if n not in known and not (path / n).is_dir()]
    (path / _CLAIMED).write_text("".join(f"{name}\n" for name in [*known, *fresh]))


def clear(folder: str) -> None:
    """Remove claimed files from *folder*, and nothing else."""
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


def make_folder(folder: str, what: str = "records") -> Path:
    """Make *folder* if necessary.

    Args:
        folder: Path of the folder.
        what: Names its content in the error.

    Raises:
        UsageError: The folder is not writable.
    """
    path = Path(folder)
    probe = path / f".paceline-probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {what} to {folder}: {error}") from error
    return path
