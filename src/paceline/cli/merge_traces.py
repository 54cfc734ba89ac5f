"""``paceline merge-traces``: what paceline recorded and what torch.profiler did, in one view."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge_traces(
    ours: Annotated[
        Path,
        typer.Argument(
            metavar="OURS",
            help="The trace in a folder of --records: records.trace.json.",
            show_default=False,
        ),
    ],
    theirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="THEIRS...",
            help="Traces of torch.profiler, made in the same run; gzipped or not.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path(
        "merged.trace.json"
    ),
) -> None:
    """Merge a trace of `run` or `emulate --records` with those of torch.profiler.

    All are put on one clock: open the file in ui.perfetto.dev.
    """
    from paceline.tools.report.merged_trace import merge_traces as merge

    _, *others = merge(ours, theirs, output)
    of = [str(one.path) if one.rank is None else f"rank {one.rank}" for one in others]
    print(f"{output}: {ours} and torch.profiler's of {', '.join(of)}")
    print("open it in ui.perfetto.dev")
