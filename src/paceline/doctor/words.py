"""A diagnosis in at most ten lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.units import show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.doctor.faults import Diagnosis, Fault
    from paceline.doctor.faults_kinds import LateRow, Row

MOST = 4
"""Faults that are shown: the rest wait until these are mended."""


def lines_of(found: Diagnosis) -> list[str]:
    """What a step costs; each fault with what to do and what that gains."""
    lines = [_cost(found)]
    for number, fault in enumerate(found.faults[:MOST], 1):
        lines += [
            f"{number}. {fault.name}, {fault.where}: {fault.because}",
            f"   {fault.do}{_gain(fault)}",
        ]
    more = len(found.faults) - MOST
    if more > 0:
        lines.append(f"and {more} more (--json has all)")
    if found.healthy:
        lines.append("no fault found" + _what_is_left(found))
    return lines


def _cost(found: Diagnosis) -> str:
    if found.step_seconds is None:
        return (
            f"{found.workers} workers: 64 MiB are summed in "
            f"{_seconds(found.predicted_seconds)}, predicted; limit {_seconds(found.limit_seconds)}"
        )
    text = f"{found.workers} workers: a step takes {_seconds(found.step_seconds)}"
    if found.alone_seconds:
        speed_up = found.workers * found.alone_seconds / found.step_seconds
        text += f", one machine's {_seconds(found.alone_seconds)}: {speed_up:.2f} x one machine"
    return text + f"; limit of an exact mean {_seconds(found.limit_seconds)}"


def _gain(fault: Fault) -> str:
    if fault.gains_seconds is None:
        return " (what that gains cannot be predicted)"
    return f" (gains {_seconds(fault.gains_seconds)}, predicted)"


def _what_is_left(found: Diagnosis) -> str:
    if found.step_seconds is None:
        return "; with a script it also sees where a step goes: paceline doctor SCRIPT"
    return "; which method is fastest here says: paceline plan SCRIPT"


def _seconds(value: float | None) -> str:
    return "?" if value is None else show_seconds(float(f"{value:.3g}"))


def faults_table(rows: Sequence[Row | LateRow]) -> str:
    """The page's table, of the registry's rows."""
    lines = ["| fault | seen in | do |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.seen} | {row.do} |" for row in rows]
    return "\n".join(lines)
