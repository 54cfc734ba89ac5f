"""Measure what papers claim, and write docs/reference/paper-results.md.

    python -m benchmarks.papers                       # every claim: about ten minutes; make reproduce
    python -m benchmarks.papers --paper osp           # the claims of one paper
    python -m benchmarks.papers --paper osp --table native      # a table of docs
    python -m benchmarks.papers --paper osp --pictures          # its pictures in docs/
    python -m benchmarks.papers --quick               # a lower bound of each paper, in a minute
    python -m benchmarks.papers --seconds 400         # begin no row later; the next run goes on
    python -m benchmarks.papers --show                # measure nothing, write the pages

The tables of docs that stand between ``<!-- papers NAME TABLE -->`` and ``<!-- end -->`` are written, too.
A figure that is kept is not measured again, unless --again is given and another commit measured it.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.measure import page_tables
from benchmarks.papers import NAMES, load
from benchmarks.papers.results import (
    PAGE,
    ROOT,
    OutOfTimeError,
    Paper,
    Results,
    cell,
    claims_table,
    page,
    refreshed,
    table,
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description="Measure what papers claim, and write docs/reference/paper-results.md.",
    )
    parser.add_argument("--paper", action="append", choices=NAMES)
    parser.add_argument("--table", action="append", help="a table of the one --paper")
    parser.add_argument("--pictures", action="store_true", help="draw those of docs/")
    parser.add_argument("--quick", action="store_true", help="check lower bounds only")
    parser.add_argument("--list", action="store_true", help="papers and their tables")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument(
        "--again", action="store_true", help="also what another commit measured"
    )
    parser.add_argument(
        "--seconds", type=float, help="begin no row after so many; the next run goes on"
    )
    given = parser.parse_args(arguments)
    if (given.table or given.pictures) and len(given.paper or ()) != 1:
        parser.error("--table and --pictures are of one paper: name it with --paper")
    return given


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    papers = [load(name) for name in given.paper or NAMES]
    if given.list:
        for paper in papers:
            print(f"{paper.name}: {paper.title}")
            for name, make in paper.tables.items():
                print(f"    --table {name}: {(make.__doc__ or '').splitlines()[0]}")
            for name in paper.pictures:
                print(f"    --pictures: docs/images/{name}")
        return
    if given.quick:
        sys.exit(check_bounds(papers))
    try:
        for paper in papers:
            run(paper, given)
    except OutOfTimeError:
        print("Out of time. The same command goes on from here.", file=sys.stderr)
    if not given.pictures:
        write_pages()


def write_pages() -> None:
    """The page of claims, the tables of the papers' pages, and those of stored measurements."""
    pages = {PAGE: page(map(load, NAMES))}
    for path in sorted({ROOT / "docs" / load(name).page for name in NAMES}):
        pages[path] = refreshed(path.read_text(), load)
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    page_tables.write_pages()


def run(paper: Paper, given: argparse.Namespace) -> None:
    """The claims of a paper, or the tables or pictures that are asked for."""
    results = Results(
        paper.path, measures=not given.show, again=given.again, seconds=given.seconds
    )
    if given.pictures:
        results.command = f"{paper.command()} --pictures"
        for name, draw in paper.pictures.items():
            draw(results, ROOT / "docs" / "images" / name)
    for name in given.table or ():
        if name not in paper.tables:
            sys.exit(f"--table {name}: {paper.name} has {', '.join(paper.tables)}")
        results.command = paper.command(name)
        print(f"\n## {name}\n\n{table(paper.tables[name](results))}")
    if not (given.table or given.pictures):
        results.command = paper.command()
        print(
            f"\n## {paper.title}\n\n{table(claims_table(paper, results))}", flush=True
        )


def check_bounds(papers: list[Paper]) -> int:
    """The quick rows; 1 if one is below its bound."""
    rows, failed = [], 0
    for paper in papers:
        results = Results()
        for quick in paper.quick:
            value = quick.ours(results)
            failed |= value < quick.at_least
            rows.append(
                {
                    "paper": paper.name,
                    "row": quick.row,
                    "ours": cell(value),
                    "at least": f"{quick.at_least:g}",
                }
            )
            print(f"{paper.name}: {quick.row}: {value:.2f}", file=sys.stderr)
    print(table(rows))
    return failed


if __name__ == "__main__":
    main()
