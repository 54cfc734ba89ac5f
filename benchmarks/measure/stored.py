"""Stores figures of benchmarks for the tables of docs, by the option ``--store``.

    python -m benchmarks.measure.import_time --store      # replaces what is stored of these rows
    python -m benchmarks.measure.import_time --store 2    # adds a second run: tables show the range

A line of ``benchmarks/results/measurements.jsonl`` is a `Record`. Its row begins with the benchmark's
name. Later runs end with their number.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from types import TracebackType

from benchmarks.papers import results
from benchmarks.papers.results import NOT_RUN, ROOT, Record, Results

RESULTS = ROOT / "benchmarks" / "results" / "measurements.jsonl"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        nargs="?",
        const=1,
        type=int,
        metavar="RUN",
        help="store the figures for docs: 1, the default, replaces the stored ones; 2 is a second run",
    )


def name_in(benchmark: str, figure: str, run: int) -> str:
    """A figure's row in a run."""
    return f"{benchmark}: {figure}" + (f", run {run}" if run > 1 else "")


class Store:
    """Takes the figures of one command, and writes them when its ``with`` block has ended.

    An exception in the block leaves the stored figures as they are. So does *run* = None.
    """

    def __init__(self, benchmark: str, run: int | None, path: Path = RESULTS) -> None:
        self._benchmark, self._run, self._path = benchmark, run, path
        self._figures: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Store:
        results.commit()  # the one at the start: it is cached
        self._start = time.monotonic()
        return self

    def add(self, figure: str, value: float, unit: str = "") -> None:
        """Adds a figure; an empty *unit* means a ratio or a count."""
        self._figures[figure] = value, unit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._run is None or kind is not None:
            return
        kept = Results(self._path)
        kept.command = command()
        kept.remove(self._is_replaced)
        seconds = time.monotonic() - self._start
        for figure, (value, unit) in self._figures.items():
            row = name_in(self._benchmark, figure, self._run)
            kept.put({row: value}, unit, seconds)

    def _is_replaced(self, record: Record) -> bool:
        """Whether a stored figure is one of this command. A first run replaces later ones, too."""
        benchmark, _, figure = record.row.partition(": ")
        if benchmark != self._benchmark:
            return False
        figure, _, number = figure.partition(", run ")
        is_of_run = self._run == 1 or int(number or 1) == self._run
        return is_of_run and (figure in self._figures or record.command == command())


def command() -> str:
    """The command line that runs now, without ``--store``."""
    words = [word for word in sys.argv[1:] if not word.startswith("--store=")]
    if "--store" in words:
        at = words.index("--store")
        has_number = words[at + 1 : at + 2] and words[at + 1].isdigit()
        del words[at : at + 1 + bool(has_number)]
    module = f"benchmarks.measure.{Path(sys.argv[0]).stem}"
    return shlex.join(["python", "-m", module, *words])


class Figures:
    """The stored figures of a benchmark, for tables."""

    def __init__(self, benchmark: str, path: Path = RESULTS) -> None:
        self._benchmark = benchmark
        self._records = {
            record.row: record for record in Results(path, measures=False).records
        }

    def runs(self, figure: str) -> list[float]:
        """A figure in each run."""
        found: list[float] = []
        while True:
            row = name_in(self._benchmark, figure, len(found) + 1)
            if (record := self._records.get(row)) is None or record.value is None:
                return found
            found.append(record.value)

    def text(self, figure: str, form: str = ".2f") -> str:
        """A figure in a format; the least and the largest where runs differ."""
        return span(self.runs(figure), form)

    def ratio(self, figure: str, other: str, form: str = ".2f") -> str:
        """One figure divided by another, run by run."""
        pairs = zip(self.runs(figure), self.runs(other), strict=False)
        return span([a / b for a, b in pairs], form)


def span(values: list[float], form: str) -> str:
    """One figure or a range; or that it was not run."""
    if not values:
        return NOT_RUN
    ends = (format(min(values), form), format(max(values), form))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
