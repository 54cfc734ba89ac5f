"""A comparison as one page: table, plots and links, without network access or scripts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from paceline.errors import UsageError
from paceline.report.curves import read_steps
from paceline.report.files import claim, make_folder
from paceline.report.pictures import COLOURS, GRID, GROUND, INK, Picture, for_page
from paceline.report.plots import looks_of, write_plots
from paceline.report.result import Outcome, Result
from paceline.report.tables import Sheet, sheet
from paceline.report.variants import Variant


def write_report(
    folder: str,
    variants: Sequence[Variant],
    results: Sequence[tuple[str, Outcome]],
    *,
    title: str,
    command: str,
    notes: Sequence[tuple[str, str]],
) -> Path:
    """Draw the plots of a comparison whose records are in *folder* and write its page,
    ``index.html``; returns the page's path. At least one of *results* has not failed.

    *notes* are lines for people, each with its name: network, compute. Raises
    `UsageError` where *folder* cannot be written.
    """
    pictures = write_plots(folder, results, read_steps(folder))
    text = page(variants, results, pictures, title=title, command=command, notes=notes)
    path = make_folder(folder) / "index.html"
    claim(folder, path.name)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the page {path}: {error}") from error
    return path


def page(
    variants: Sequence[Variant],
    results: Sequence[tuple[str, Outcome]],
    pictures: Sequence[Picture],
    *,
    title: str,
    command: str,
    notes: Sequence[tuple[str, str]],
) -> str:
    """The page's text; everything but the pictures is escaped."""
    template = resources.files("paceline.report") / "page.html"
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    first = next(outcome for _, outcome in results if isinstance(outcome, Result))
    many = "worker" if first.workers == 1 else "workers"
    headings, rows, legend, footnotes = table(results)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        command=command,
        notes=[*notes, ("world", f"{first.world}, {first.workers} {many}")],
        headings=headings,
        rows=rows,
        legend=legend,
        footnotes=footnotes,
        pictures=[(picture, Markup(for_page(picture))) for picture in pictures],
        traces=[
            (look.label, f"{variant.file_name}.trace.json")
            for look, variant, (_, outcome) in zip(
                looks_of([v.spec for v in variants]), variants, results, strict=True
            )
            if isinstance(outcome, Result)
        ],
        comma=Markup(",<wbr>"),  # where long specs are best broken
        colours=COLOURS,
        ink=INK,
        grid=GRID,
        ground=GROUND,
    )


def table(
    results: Sequence[tuple[str, Outcome]],
) -> Sheet:
    """The table as `print_results` has it, with variants called as in plots."""
    looks = looks_of([spec for spec, _ in results])
    return sheet([(look.label, r) for look, (_, r) in zip(looks, results, strict=True)])
