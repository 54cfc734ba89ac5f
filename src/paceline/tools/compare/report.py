"""A comparison as a page: table, plots, a step of each variant, and links to all records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paceline.records import StepRecord
from paceline.runtimes.results import Outcome, RunResult
from paceline.tools.compare.curves import read_steps
from paceline.tools.compare.runner import Variant, VariantStep
from paceline.tools.report.colours import COLOURS
from paceline.tools.report.html import NAME, write_page
from paceline.tools.report.model import (
    Cell,
    Drawn,
    Links,
    Number,
    Pictures,
    Report,
    Section,
    Table,
    TimelineSection,
)
from paceline.tools.report.pictures import Picture, for_page
from paceline.tools.report.plots import Look, looks_of, write_plots
from paceline.tools.report.terminal import Sheet, sheet
from paceline.tools.report.timeline import Step, step_of
from paceline.tools.report.traces import spans_in
from paceline.units import show_seconds

SPANS = 24_000
"""Of all timelines of a page together: a third of a megabyte."""


def write_report(
    folder: str,
    variants: Sequence[Variant],
    results: Sequence[tuple[str, Outcome]],
    *,
    title: str,
    command: str,
    notes: Sequence[tuple[str, str]],
    consistencies: Sequence[str] = (),
) -> Path:
    """Draw the plots of a comparison whose records are in *folder* and write its page,
    ``index.html``; returns the page's path. At least one of *results* has not failed.

    *notes* are lines for people, each with its name: network, compute. *consistencies*: each
    variant's class (empty: nobody says). Raises `UsageError` where *folder* cannot be written.
    """
    records = read_steps(folder)
    pictures = write_plots(folder, results, records)
    steps = _steps(Path(folder), variants, results, records)
    first = next(outcome for _, outcome in results if isinstance(outcome, RunResult))
    many = "worker" if first.workers == 1 else "workers"
    page = Report(
        title=title,
        answer=answer(results),
        command=command,
        notes=[*notes, ("runtime", f"{first.runtime}, {first.workers} {many}")],
        details=_details(results, consistencies),
        sections=[
            *_shown(results, consistencies, pictures, steps),
            *_files(variants, results),
        ],
    )
    return write_page(Path(folder) / NAME, page)


def answer(results: Sequence[tuple[str, Outcome]]) -> str:
    """Which variant has the shortest step, and how it compares with the first."""
    timed = [
        (look.label, outcome.step_seconds)
        for look, (_, outcome) in zip(_looks(results), results, strict=True)
        if isinstance(outcome, RunResult) and outcome.step_seconds
    ]
    if not timed:
        return "no step was taken"
    name, least = min(timed, key=lambda pair: pair[1])
    if len(timed) == 1:
        return f"{name}: {show_seconds(least)} a step"
    other, seconds = timed[0]
    if name == other:
        other, seconds = min(timed[1:], key=lambda pair: pair[1])
    return (
        f"{name} has the shortest step, {show_seconds(least)}; {other} takes "
        f"{seconds / least:.2f} times as long"
    )


def _details(
    results: Sequence[tuple[str, Outcome]], consistencies: Sequence[str]
) -> list[str]:
    """The shortest step of each class, where there are several: what is shorter may promise
    less."""
    best: dict[str, tuple[float, str]] = {}
    for consistency, look, (_, outcome) in zip(
        consistencies, _looks(results), results, strict=False
    ):
        if consistency and isinstance(outcome, RunResult) and outcome.step_seconds:
            mine = outcome.step_seconds, look.label
            best[consistency] = min(mine, best.get(consistency, mine))
    if len(best) < 2:
        return []
    return [
        f"{consistency}: {name}, {show_seconds(seconds)}"
        for consistency, (seconds, name) in best.items()
    ]


def _looks(results: Sequence[tuple[str, Outcome]]) -> Sequence[Look]:
    return looks_of([spec for spec, _ in results])


def table(results: Sequence[tuple[str, Outcome]]) -> Sheet:
    """The table as `print_results` has it, with variants called as in plots."""
    looks = _looks(results)
    return sheet([(look.label, r) for look, (_, r) in zip(looks, results, strict=True)])


def _shown(
    results: Sequence[tuple[str, Outcome]],
    consistencies: Sequence[str],
    pictures: Sequence[Picture],
    steps: Sequence[Step],
) -> list[Section]:
    headings, rows, legend, notes = table(results)
    metrics = headings[7:-1] if len(rows) > 1 else headings[7:]
    caption = "; ".join(legend)
    if len(rows) > 1:
        caption += "; ratio = step over the first variant's"
    cells = [
        _cells(row, outcome, metrics)
        for row, (_, outcome) in zip(rows, results, strict=True)
    ]
    if consistencies:
        headings = [headings[0], "consistency", *headings[1:]]
        for mine, consistency in zip(cells, consistencies, strict=True):
            mine.insert(1, consistency or None)
    figures = Table(
        title="Variants",
        headings=headings,
        rows=cells,
        caption=f"{caption}; metrics are the last ones that rank 0 logged",
        colours=[i % len(COLOURS) for i in range(len(rows))],
        notes=notes,
    )
    drawn = [
        Drawn(
            title=picture.title,
            svg=for_page(picture),
            caption=picture.caption,
            files=[("SVG", f"{picture.name}.svg"), ("PNG", f"{picture.name}.png")],
        )
        for picture in pictures
    ]
    return [
        figures,
        *(
            [TimelineSection(title="A step, moment by moment", steps=steps)]
            if steps
            else []
        ),
        Pictures(title="Pictures", pictures=drawn),
    ]


def _cells(row: Sequence[str], outcome: Outcome, metrics: Sequence[str]) -> list[Cell]:
    """The table's words, with the figures by which they are sorted."""
    if not isinstance(outcome, RunResult):
        return list(row)
    values = [
        *(outcome.buckets, outcome.settled_from),
        *(outcome.step_seconds, outcome.compute_seconds),
        *(outcome.exposed_communication_seconds, outcome.bytes_sent_per_worker),
        *(outcome.metrics.get(metric) for metric in metrics),
        outcome.step_seconds,
    ]
    figures: list[Cell] = [
        Number(None if text == "-" else value, text)
        for text, value in zip(row[1:], values, strict=False)
    ]
    return [row[0], *figures]


def _steps(
    folder: Path,
    variants: Sequence[Variant],
    results: Sequence[tuple[str, Outcome]],
    records: Sequence[VariantStep],
) -> list[Step]:
    """A step of each variant that ran."""
    ran = [
        (look.label, variant)
        for look, variant, (_, outcome) in zip(
            _looks(results), variants, results, strict=True
        )
        if isinstance(outcome, RunResult)
    ]
    mine: dict[str, list[StepRecord]] = {}
    for record in records:
        mine.setdefault(record.variant, []).append(record)
    found = []
    for label, variant in ran:
        trace = folder / f"{variant.file_name}.trace.json"
        if not trace.exists():
            continue
        spans = partial(spans_in, trace)
        most = SPANS // max(6, len(ran))
        step = step_of(label, spans, mine.get(variant.spec, []), most)
        if step is not None:
            found.append(step)
    return found


def _files(
    variants: Sequence[Variant], results: Sequence[tuple[str, Outcome]]
) -> list[Section]:
    traces = [
        (look.label, f"{variant.file_name}.trace.json")
        for look, variant, (_, outcome) in zip(
            _looks(results), variants, results, strict=True
        )
        if isinstance(outcome, RunResult)
    ]
    return [
        Links(
            title="Traces",
            files=traces,
            caption="What every worker did, moment by moment: open ui.perfetto.dev in a "
            "browser and load the file.",
        ),
        Links(
            title="Records",
            files=[("records.jsonl", "records.jsonl")],
            caption="A line of JSON per variant, worker and step.",
        ),
    ]
