"""A plan in words: what comes of it in one sentence, why, and what would help."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from paceline.cluster import Cluster
from paceline.interfaces import Consistency
from paceline.tools.plan.estimates import CLEARLY, DDP, LOSSLESS, Estimate, Plan
from paceline.tools.plan.suggestions import Suggestions
from paceline.units import show_bytes, show_rate, show_seconds

WORTH = 1.1
"""Times as fast as all that promise more: else a weaker promise is not worth a word."""
MANY_STEPS = 50
"""Before a method is as fast as planned: fewer are nothing in a training."""
SHOWN = 0.01
"""Of a step: less is nothing."""


def verdict(plan: Plan, found: Suggestions | None = None) -> str:
    """The answer to "which method, here?" in one sentence, or two."""
    baseline = plan.baseline
    workers = baseline.workers
    if workers == 1:
        return "One worker is one machine: it waits for nobody, whatever the method."
    consistency, row = strongest(plan)
    speedup = baseline.speedup(row)
    if speedup >= CLEARLY and row.spec == DDP:
        best = plan.fastest[consistency]
        text = (
            f"{workers} workers train {times(speedup)} as fast as one machine "
            f"with DDP's rule: stay with DDP{_hardly_faster(row, consistency, best)}"
        )
    elif speedup >= CLEARLY:
        text = (
            f"{workers} workers train {times(speedup)} as fast as one machine "
            f"with {row.spec} ({consistency}){_against_ddp(plan, row)}"
        )
    else:
        how = "slower than" if speedup < 1 / CLEARLY else "no faster than"
        text = (
            f"{workers} workers are {how} one machine with every {consistency} method "
            f"({times(speedup)} as fast with {row.spec}{_rate(found, row)})"
        )
    weaker = _worth_it(plan, row)
    if weaker:
        words = [
            f"{times(baseline.speedup(one))} with {one.spec} ({one.consistency})"
            for one in weaker
        ]
        text += "; where less than that will do, " + ", ".join(words)
    if max(baseline.speedup(one) for one in plan.recommended.values()) < CLEARLY:
        text += ". No class is faster here than one machine alone"
    return text + "."


def strongest(plan: Plan) -> tuple[Consistency, Estimate]:
    """The best of the strongest class that has one."""
    return next(iter(plan.recommended.items()))


def times(factor: float) -> str:
    """``2.4 x``."""
    return f"{factor:.2f} x" if factor < 10 else f"{factor:.1f} x"


def _against_ddp(plan: Plan, row: Estimate) -> str:
    ddp = plan.estimate(DDP)
    if ddp is None:
        return ""
    factor = ddp.step_seconds / row.step_seconds
    return f", {times(factor)} as fast as with DDP's rule"


def _hardly_faster(ddp: Estimate, consistency: Consistency, row: Estimate) -> str:
    if row is ddp:
        return f" (no {consistency} method is faster)"
    gain = ddp.step_seconds / row.step_seconds - 1
    return f" ({row.spec}, the best {consistency} method, is {100 * gain:.1g} % faster)"


def _rate(found: Suggestions | None, row: Estimate) -> str:
    for one in () if found is None else found.break_even:
        if one.spec == row.spec and one.rate is not None:
            digits = float(f"{one.rate * 8:.2g}") / 8
            return f"; links of {show_rate(digits)} would make them equal"
    return ""


def _worth_it(plan: Plan, first: Estimate) -> list[Estimate]:
    """The best of each weaker class, where it is faster than all that promise more."""
    best, found = first.step_seconds, []
    for row in plan.recommended.values():
        if row.step_seconds * WORTH <= best:
            best = row.step_seconds
            found.append(row)
    return found


def summary(plan: Plan, cluster: Cluster, found: Suggestions) -> list[tuple[str, str]]:
    """Lines with their names: one machine, all workers, why, the limit, what would help."""
    workers, single = plan.baseline.workers, plan.baseline.single.step_seconds
    alone = f"{show_seconds(single / workers)} a batch of its own"
    if workers == 1:
        return [("one machine", alone)]
    row = next(iter(plan.recommended.values()))
    together = (
        f"{show_seconds(row.step_seconds)} a step = {show_seconds(row.compute_seconds)} "
        f"computing + {show_seconds(row.exposed_seconds)} waiting, with {row.spec}: "
        f"{times(plan.baseline.speedup(row))} one machine"
    )
    lines = [
        (
            "one machine",
            f"{alone}, {show_seconds(single)} for as many samples as {workers} take",
        ),
        (f"{workers} workers", together),
        ("why", _why(row, cluster)),
    ]
    ddp = plan.estimate(DDP)
    if ddp is not None and ddp is not row:
        lines.append(
            (
                "",
                f"DDP's rule: {show_seconds(ddp.step_seconds)}; no exact mean is faster "
                f"than {show_seconds(plan.baseline.lower_bound_seconds)}",
            )
        )
    lines += [("links", f"{each.words} with {each.spec}") for each in found.break_even]
    lines += [
        ("would help", f"{each.what}: {times(each.speedup)} one machine")
        for each in found.helps
    ]
    if found.tried and not found.helps:
        lines.append(("would help", f"none of {found.tried} changes that were tried"))
    return _named_once(lines)


def _why(row: Estimate, cluster: Cluster) -> str:
    slowest = min(rate for rack in cluster.racks for rate in rack.links)
    text = f"{show_bytes(row.bytes_sent)} leave each worker in a step"
    if any(rack.workers_per_host > 1 for rack in cluster.racks):
        return text  # part of it stays in the host
    seconds = row.bytes_sent / slowest
    text += f": {show_seconds(seconds)} at {show_rate(slowest)}"
    hidden = seconds - row.exposed_seconds
    if hidden > SHOWN * row.step_seconds:
        text += f", of which {show_seconds(hidden)} pass while it computes"
    return text


def _named_once(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A name that stands above is not repeated."""
    before = [""] + [name for name, _ in lines]
    return [
        ("" if name == last else name, text)
        for (name, text), last in zip(lines, before, strict=False)
    ]


def passed_over(plan: Plan) -> str:
    """Which are faster than what is recommended, and why they are not; empty where none is."""
    recommended = plan.recommended
    faster = [
        f"{row.spec} ({consistency}, {show_seconds(row.step_seconds)})"
        for consistency, row in plan.fastest.items()
        if consistency not in LOSSLESS and recommended.get(consistency, row) is not row
    ]
    if not faster:
        return ""
    return (
        "faster a step by a fifth at most, and not recommended, as what sends less learns less from a "
        f"step: {', '.join(faster)}"
    )


def slow_starts(plan: Plan) -> str:
    """Which of those that are to be taken need many steps before they are as fast as the plan says; empty
    where none does."""
    late = [
        f"{row.spec} (from step {row.steady_after + 1} on)"
        for row in plan.recommended.values()
        if row.steady_after >= MANY_STEPS
    ]
    return f"not as fast from the start: {', '.join(late)}" if late else ""


def reasons(plan: Plan) -> dict[str, list[str]]:
    """Why candidates were left out, each reason with their specs; what most share first."""
    found: dict[str, list[str]] = {}
    for one in plan.infeasible:
        found.setdefault(one.reason, []).append(one.spec)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def commands(
    plan: Plan, script: str, arguments: Sequence[str] = ()
) -> dict[Consistency, str]:
    """What trains by the best of each class, as recommended."""
    return {
        consistency: command(row.spec, script, arguments)
        for consistency, row in plan.recommended.items()
    }


def command(
    spec: str,
    script: str,
    arguments: Sequence[str] = (),
    *,
    verb: str = "run",
    options: Sequence[str] = (),
) -> str:
    """What trains so."""
    words = ["paceline", verb, script, *options, "--method", spec]
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])
