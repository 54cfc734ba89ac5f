"""Figures of papers: each is measured once, and kept as a line of a file.

A line of ``benchmarks/results/papers/<paper>.jsonl`` is a `Record`. Tables, pictures and the page
``docs/reference/paper-results.md`` are made of these lines alone.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "papers"
PAGE = ROOT / "docs" / "reference" / "paper-results.md"
NOT_RUN = "not run at this commit"


# ---- figures ----


@dataclass(frozen=True)
class Record:
    """A figure, and how it was made.

    *value*: None where the target was not reached. *machine* and *seconds*: None where an older format
    lacked them, or where the figure is taken from a printed table. It then has that table's digits.
    """

    row: str
    value: float | None
    unit: str
    command: str
    commit: str
    machine: str | None
    seconds: float | None


class OutOfTimeError(Exception):
    """The time for which rows may begin is over."""


class Results:
    """The figures of a paper; those that are missing are measured when they are asked for.

    Args:
        path: The file; None: figures are kept in memory only.
        measures: Whether missing figures are measured. If not, they are NaN.
        again: Measure figures again that another commit has measured.
        seconds: No row begins later than that. None: no limit.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        measures: bool = True,
        again: bool = False,
        seconds: float | None = None,
    ) -> None:
        self.command = ""
        """The command whose rows are measured now."""
        self.read: dict[str, Record] = {}
        """Records that were asked for since this was cleared."""
        self._path, self._measures, self._again = path, measures, again
        self._start = time.monotonic()
        self._seconds = math.inf if seconds is None else seconds
        self._records: dict[str, Record] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                record = Record(**json.loads(line))
                self._records[record.row] = record

    def value(self, row: str, unit: str, measure: Callable[[], float | None]) -> Any:
        """The figure of a row; NaN if it is missing and not to be measured."""
        return self._figures({row: unit}, row, lambda: {row: measure()})[row]

    def values(
        self,
        row: str,
        units: Mapping[str, str],
        measure: Callable[[], Mapping[str, float | None]],
    ) -> dict[str, Any]:
        """Several figures that one run gives, by name; a line each."""
        names = {f"{row}: {name}": name for name in units}

        def run() -> dict[str, float | None]:
            found = measure()
            return {whole: found[name] for whole, name in names.items()}

        wanted = {whole: units[name] for whole, name in names.items()}
        figures = self._figures(wanted, row, run)
        return {names[whole]: value for whole, value in figures.items()}

    def has(self, row: str) -> bool:
        """Whether a row is stored."""
        return row in self._records

    def stored(self, row: str) -> Any:
        """The stored figure of a row; NaN if it is missing, which measures nothing."""
        return self._records[row].value if row in self._records else math.nan

    def rows(self) -> list[str]:
        """The names of all stored rows, in their order."""
        return list(self._records)

    @property
    def records(self) -> tuple[Record, ...]:
        """All stored records, in their order."""
        return tuple(self._records.values())

    def remove(self, is_gone: Callable[[Record], bool]) -> None:
        """Drop records; the file drops them when something is stored."""
        self._records = {
            row: record for row, record in self._records.items() if not is_gone(record)
        }

    def put(
        self, figures: Mapping[str, float | None], unit: str, seconds: float
    ) -> None:
        """Store the figures that a run has given; they replace rows of the same names."""
        for row, value in figures.items():
            self._records[row] = Record(
                row=row,
                value=None if value is None else float(f"{value:.7g}"),
                unit=unit,
                command=self.command,
                commit=commit(),
                machine=machine(),
                seconds=round(seconds, 1),
            )
        self._save()

    def _figures(
        self,
        units: Mapping[str, str],
        row: str,
        measure: Callable[[], Mapping[str, float | None]],
    ) -> dict[str, Any]:
        if not all(map(self._is_kept, units)):
            if not self._measures:
                return dict.fromkeys(units, math.nan)
            self._measure(units, row, measure)
        self.read |= {name: self._records[name] for name in units}
        return {name: self._records[name].value for name in units}

    def _is_kept(self, row: str) -> bool:
        record = self._records.get(row)
        if record is None or not (self._again and self._measures):
            return record is not None
        return record.commit == commit()

    def _measure(
        self,
        units: Mapping[str, str],
        row: str,
        measure: Callable[[], Mapping[str, float | None]],
    ) -> None:
        elapsed = time.monotonic() - self._start
        if elapsed > self._seconds:
            raise OutOfTimeError
        if self._path is not None:
            print(f"[{elapsed:5.0f} s] {row}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        found = measure()
        took = round(time.monotonic() - begin, 1)
        for name, unit in units.items():
            self.put({name: found[name]}, unit, took)

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(asdict(record)) for record in self._records.values())
        new = self._path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self._path)


@cache
def commit() -> str:
    """The checked-out commit, with "+" if code or benchmarks differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False
        ).stdout.strip()

    places = ("src", "benchmarks", "examples", ":!benchmarks/results")
    changed = git("status", "--porcelain", "--", *places)
    return (git("rev-parse", "--short=8", "HEAD") or "unknown") + "+" * bool(changed)


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


# ---- papers ----


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and the figure of ours that is held against it.

    Args:
        row: What the figure is of, in a few words.
        says: The paper's claim.
        conditions: What ours is measured on.
        ours: The figure, of results; or the figure and its standard error.
        at_least: The claim is reached by such a figure, or a larger one; NaN: the paper has none.
        unit: Of the figure; empty: a ratio.
        why_not: Why ours is lower, where it is.
    """

    row: str
    says: str
    conditions: str
    ours: Callable[[Results], float | tuple[float, float]]
    at_least: float = math.nan
    unit: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Quick:
    """A row in virtual time that takes seconds, and the least that it must be."""

    row: str
    ours: Callable[[Results], float]
    at_least: float


Table = Callable[[Results], Iterable[Mapping[str, Any]]]
"""Rows of a table, each by column; a string, a number, or NaN where it was not run."""


@dataclass(frozen=True)
class Paper:
    """A paper: its *claims*, a *quick* check of them, and the *tables* and *pictures* of docs.

    *source* says where the claims are from, and how sure that is. Names of pictures are those of
    files in ``docs/``.
    """

    name: str
    title: str
    page: str
    source: str
    claims: tuple[Claim, ...] = ()
    quick: tuple[Quick, ...] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    pictures: Mapping[str, Callable[[Results, Path], None]] = field(
        default_factory=dict
    )

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.jsonl"

    def command(self, table: str = "") -> str:
        return f"python -m benchmarks.papers --paper {self.name}" + (
            f" --table {table}" if table else ""
        )


# ---- Markdown ----


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a table; columns are those of the first row, then others as they come."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = (cell(row.get(column, "")) for column in columns)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def formatted(value: float, form: str) -> str:
    """A number in a format; or that it was not run."""
    return NOT_RUN if math.isnan(value) else format(value, form)


def cell(value: Any) -> str:
    if isinstance(value, tuple):
        mean, error = value
        return NOT_RUN if math.isnan(mean) else f"{mean:.2f} ± {error:.2f}"
    if isinstance(value, float):
        if math.isnan(value):
            return NOT_RUN
        if math.isinf(value):
            return "not reached"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return str(value)


def claims_table(paper: Paper, results: Results) -> list[dict[str, Any]]:
    """A row for each claim, with ours where it was run."""
    rows = []
    for claim in paper.claims:
        results.read.clear()
        ours = claim.ours(results)
        value, error = ours if isinstance(ours, tuple) else (ours, math.nan)
        commits = sorted({record.commit for record in results.read.values()})
        took = {
            record.row.partition(": ")[0]: record.seconds
            for record in results.read.values()
        }
        was_run = not math.isnan(value)
        known = [seconds for seconds in took.values() if seconds is not None]
        rows.append(
            {
                "what": claim.row,
                "the paper": claim.says,
                "conditions of ours": claim.conditions,
                "ours": f"**{shown(value, error, claim.unit)}**"
                if was_run
                else NOT_RUN,
                "reached": verdict(claim, value),
                "commit": ", ".join(commits) if was_run else "",
                "seconds": f"{sum(known):.0f}" if was_run and known else "",
            }
        )
    return rows


def headline(paper: Paper, results: Results) -> list[dict[str, Any]]:
    """A row for each claim, short enough for the paper's own page."""
    rows = claims_table(paper, results)
    return [
        {"what": row["what"], "the paper": row["the paper"], "ours": row["ours"]}
        for row in rows
    ]


HEADLINE = "headline"
"""The table's name under which `refreshed` knows the claims of a paper."""


def shown(value: float, error: float, unit: str) -> str:
    text = f"{value:.2f}" if not unit else f"{value:+.2f}"
    text += "" if math.isnan(error) else f" ± {error:.2f}"
    return f"{text} {unit}".strip()


def verdict(claim: Claim, value: float) -> str:
    if math.isnan(value):
        return ""
    if math.isnan(claim.at_least):
        return "the paper has none"
    if value >= claim.at_least:
        return "yes"
    return f"no: {claim.why_not}" if claim.why_not else "no"


def refreshed(text: str, load: Callable[[str], Paper]) -> str:
    """A page's text with its tables as the kept figures make them.

    A table stands between ``<!-- papers NAME TABLE -->`` and ``<!-- end -->``. The table
    ``headline`` is the paper's claims beside ours.
    """

    def fresh(match: re.Match[str]) -> str:
        paper = load(match[2])
        results = Results(paper.path, measures=False)
        if match[3] == HEADLINE:
            rows: Iterable[Mapping[str, Any]] = headline(paper, results)
        else:
            rows = paper.tables[match[3]](results)
        return f"{match[1]}\n{table(rows)}\n\n<!-- end -->"

    place = r"(<!-- papers (\w+) (\S+) -->\n).*?<!-- end -->"
    return re.sub(place, fresh, text, flags=re.DOTALL)


HEAD = """\
# Results of the papers

For engineers who compare paceline with papers. You get the claims of six papers beside our figures.
All of our figures are from the simulated runtime, with real gradients in virtual time.

`make reproduce` measures every row (about ten minutes on two cores) and writes this page; `make reproduce QUICK=1`
checks a lower bound of each paper in a minute. A row that was not measured says so. Each figure is a line in
`benchmarks/results/papers/`, with its command, commit, machine and seconds. `python -m benchmarks.papers --list`
lists more tables of each paper.
"""


def page(papers: Iterable[Paper]) -> str:
    """The text of `PAGE`, of the figures that are kept."""
    text = HEAD
    for paper in papers:
        results = Results(paper.path, measures=False)
        text += (
            f"\n## {paper.title}\n\nSource of the claims: {paper.source}. "
            f"Command of our figures: `{paper.command()}`. "
        )
        text += f"More: [{Path(paper.page).name}](../{paper.page}).\n\n"
        text += table(claims_table(paper, results)) + "\n"
    return text
