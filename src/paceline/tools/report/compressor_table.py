"""The table of `paceline profile --compression`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from paceline.cluster.profiling import CompressorCost, NotApplicable
from paceline.tools.report.terminal import console_for_tables
from paceline.units import show_bytes, show_rate, show_seconds

Rows = Sequence[CompressorCost | NotApplicable]

HEADINGS = (
    *("ratio", "sent", "encode", "decode"),
    *("error", "of the sum", "pays below"),
)
LEGEND = (
    "ratio: bytes of the gradient over those of a worker's own codes. sent: bytes that each "
    "worker sends for them, where {dense} are sent without compression.",
    "error: the norm of mean less gradient, over the gradient's, at one step; of the sum: the "
    "same of sums over {steps} steps, with what is kept in between (residuals, factors).",
    "pays below B, where 2(n-1)/n S / B = encode + decode + sent / B: a ring all-reduce of S = "
    "{size} among n = {workers} against coding and its own bytes, one after the other. What "
    "hides behind the backward pass, and start-ups, are the planner's business: paceline "
    "compare tells them.",
)


def print_prices(rows: Rows, workers: int) -> None:
    """A row for each compressor that suits the model, and the reason of each that does not."""
    priced = [row for row in rows if isinstance(row, CompressorCost)]
    console = console_for_tables()
    if priced:
        table = Table(title=f"compression of this model's gradients, {workers} workers")
        table.add_column("compression", overflow="fold")
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in priced:
            table.add_row(Text(row.compression), *map(Text, _cells(row)))
        console.print(table)
        first = priced[0]
        for sentence in LEGEND:
            filled = sentence.format(
                dense=show_bytes(first.dense_traffic_bytes),
                size=show_bytes(first.dense_bytes),
                steps=first.steps,
                workers=workers,
            )
            console.print(Text(filled))
    for other in rows:
        if isinstance(other, NotApplicable):
            console.print(Text(f"{other.compression} does not suit: {other.reason}"))


def _cells(row: CompressorCost) -> list[str]:
    below = row.pays_below
    return [
        f"{row.ratio:.3g}",
        show_bytes(row.traffic_bytes),
        show_seconds(row.encode_seconds),
        show_seconds(row.decode_seconds),
        f"{row.error:.2g}",
        f"{row.error_of_sum:.2g}",
        "nowhere" if below is None else show_rate(float(f"{8 * below:.3g}") / 8),
    ]
