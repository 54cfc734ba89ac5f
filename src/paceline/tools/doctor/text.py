"""A diagnosis in at most ten lines."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.tools.doctor.diagnosis import Diagnosis, Fault
from paceline.tools.doctor.fault_kinds import FaultKind, LateRow
from paceline.units import show_seconds

MOST_LINES = 10
"""Faults for which there is no line left wait until others are mended."""


def lines_of(found: Diagnosis) -> list[str]:
    """What a step costs; each fault with what to do and what that gains."""
    lines = [_cost(found), *found.notes[:2]]
    shown = found.faults[: (MOST_LINES - 1 - len(lines)) // 2]
    for number, fault in enumerate(shown, 1):
        name, do = lines_of_fault(fault)
        lines += [f"{number}. {name}", f"   {do}"]
    more = len(found.faults) - len(shown)
    if more > 0:
        lines.append(f"and {more} more (--json has all)")
    if found.healthy:
        lines.append(f"no fault found; {what_is_left(found)}")
    return lines


def lines_of_fault(fault: Fault) -> tuple[str, str]:
    """What it is, and what to do."""
    return (
        f"{fault.name}, {fault.where}: {fault.because}",
        f"{fault.do}{_gain(fault)}",
    )


def capitalised(text: str) -> str:
    """With a capital at its start, and all else as it is: names, units and commands."""
    return text[:1].upper() + text[1:]


def _cost(found: Diagnosis) -> str:
    if found.step_seconds is None:
        return (
            f"{found.workers} workers: 64 MiB are summed in "
            f"{_seconds(found.predicted_seconds)}, predicted; limit {_seconds(found.lower_bound_seconds)}"
        )
    text = (
        f"{found.workers} workers: a step takes {_seconds(found.step_seconds)}, predicted from "
        f"its parts {_seconds(found.predicted_seconds)}"
    )
    if not found.healthy and found.mended_seconds is not None:
        text += f", without these faults {_seconds(found.mended_seconds)}"
    if found.alone_seconds:
        speedup = found.workers * found.alone_seconds / found.step_seconds
        text += f"; one machine's {_seconds(found.alone_seconds)}: {speedup:.2f} x one machine"
    return text + f"; {limit_of(found)} {_seconds(found.lower_bound_seconds)}"


def limit_of(found: Diagnosis) -> str:
    """What the limit is one of: faults that slow links or workers down are in it."""
    return "limit of an exact mean" + ("" if found.healthy else ", with these faults,")


def _gain(fault: Fault) -> str:
    if fault.gains_seconds is None:
        return " (what that gains cannot be predicted)"
    return f" (gains {_seconds(fault.gains_seconds)}, predicted)"


def what_is_left(found: Diagnosis) -> str:
    """What else may be asked where nothing is wrong."""
    if found.step_seconds is None:
        return "with a script it also sees where a step goes: paceline doctor SCRIPT"
    return "which method is fastest here says: paceline plan SCRIPT"


def _seconds(value: float | None) -> str:
    return "?" if value is None else show_seconds(float(f"{value:.3g}"))


def faults_table(rows: Sequence[FaultKind | LateRow]) -> str:
    """The page's table, of the registry's rows."""
    lines = ["| fault | seen in | do |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.seen} | {row.do} |" for row in rows]
    return "\n".join(lines)
