"""The answer of a plan in at most five lines: the recommended method, and when a weaker consistency is worth it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.cluster import Cluster
from paceline.interfaces import Consistency
from paceline.tools.plan.estimates import DDP, Estimate, Plan
from paceline.tools.plan.what_if import Suggestion, Suggestions
from paceline.units import show_bytes, show_count, show_rate, show_seconds

FASTER = 1.02
"""Speed relative to one machine: a smaller gain is none."""
WORTH = 1.1
"""Speed relative to all stronger consistencies: a weaker one that gains less is not in the answer."""
LITTLE = 0.05
"""Per cent: a smaller gain is none."""
MOST_WEAKER = 3
"""Weaker consistencies in the answer, which has at most five lines."""
_WITH: dict[Consistency, str] = {
    "exact": "With exact averaging",
    "delayed": "With delayed gradients",
    "lossy": "With compressed gradients",
    "local": "With local updates",
    "asynchronous": "With asynchronous updates",
}


def headline(
    plan: Plan, suggestions: Suggestions | None = None, cluster: Cluster | None = None
) -> list[str]:
    """Return the answer to "which method, here?", in at most five lines."""
    baseline = plan.baseline
    if not plan.estimates:
        return ["1 worker is one machine: it sends nothing, whatever the method."]
    consistency, best = strongest(plan)
    if baseline.speedup(best) < FASTER:
        return _slower_than_one(plan, suggestions, cluster)
    ddp = plan.estimate(DDP)
    workers = show_count(baseline.workers, "worker")
    shown = best if ddp is None else ddp
    name = shown.spec if ddp is None else "DDP"
    lines = [
        f"{workers} with {name} train {times(baseline.speedup(shown))} as fast as one machine: a "
        f"step takes {show_seconds(shown.step_seconds)}, of which "
        f"{show_seconds(shown.exposed_seconds)} are exposed communication."
    ]
    if ddp is best:
        lines.append(_stay_with_ddp(plan, consistency))
    elif ddp is not None:
        lines.append(f"Same result, best method: {_figures(plan, best)}.")
    lines += [
        f"{_WITH[one.consistency]}: {_figures(plan, one)}." for one in _weaker(plan)
    ]
    return lines


def strongest(plan: Plan) -> tuple[Consistency, Estimate]:
    """Return the recommended method of the strongest consistency."""
    return next(iter(plan.recommended.items()))


def _stay_with_ddp(plan: Plan, consistency: Consistency) -> str:
    fastest = plan.fastest[consistency]
    if fastest.spec == DDP:
        return f"Stay with DDP: no {consistency} method is faster."
    gain = 100 * (over_ddp(plan, fastest) - 1)
    if gain < LITTLE:
        return f"Stay with DDP: no {consistency} method is faster."
    return (
        f"Stay with DDP: {fastest.spec}, the best {consistency} method, is only "
        f"{gain:.1g} % faster."
    )


def _figures(plan: Plan, estimate: Estimate) -> str:
    text = f"{estimate.spec}, {show_seconds(estimate.step_seconds)}"
    if plan.estimate(DDP) is None:
        return f"{text} ({times(plan.baseline.speedup(estimate))} one machine)"
    return f"{text} ({times(over_ddp(plan, estimate))} DDP)"


def over_ddp(plan: Plan, estimate: Estimate) -> float:
    ddp = plan.estimate(DDP)
    return float("nan") if ddp is None else ddp.step_seconds / estimate.step_seconds


def _weaker(plan: Plan) -> list[Estimate]:
    """Return the recommended methods of weaker consistencies that are `WORTH` it; of many, the fastest."""
    _, best = strongest(plan)
    found, seconds = [], best.step_seconds
    for one in plan.recommended.values():
        if one.step_seconds * WORTH <= seconds:
            seconds = one.step_seconds
            found.append(one)
    return found[-MOST_WEAKER:]


def _slower_than_one(
    plan: Plan, suggestions: Suggestions | None, cluster: Cluster | None
) -> list[str]:
    """Return the answer if the strongest consistency gains nothing over one machine."""
    baseline = plan.baseline
    consistency, best = strongest(plan)
    what = (
        "a second machine" if baseline.workers == 2 else f"{baseline.workers} workers"
    )
    article = "an" if consistency[0] in "aeiou" else "a"
    lines = [
        f"Do not use {what} with {article} {consistency} method: the best one ({best.spec}, "
        f"{show_seconds(best.step_seconds)}) reaches {times(baseline.speedup(best))} of one machine."
    ]
    sends = f"A step must send {show_bytes(best.bytes_sent)}"
    if cluster is not None and one_worker_a_host(cluster):
        rate = slowest_link(cluster)
        sends += (
            f", which takes {show_seconds(best.bytes_sent / rate)} at {show_rate(rate)}"
        )
    lines.append(f"{sends}; computing takes {show_seconds(best.compute_seconds)}.")
    faster = sorted(
        (one for one in plan.recommended.values() if baseline.speedup(one) >= FASTER),
        key=lambda one: one.step_seconds,
    )
    ways = [
        f"{one.spec} {times(baseline.speedup(one))} ({class_name(one.consistency)})"
        for one in faster
    ]
    if suggestions is not None:
        ways += [
            f"links above {two_digits(one.rate)} with {one.spec}"
            for one in suggestions.break_even
            if one.spec == best.spec and one.rate is not None
        ]
        ways += [
            f"{one.what} ({times(one.speedup)})"
            for one in smallest_of_each_kind(suggestions)
            if one.speedup >= FASTER
        ]
    if ways:
        lines.append(f"Faster than one machine: {_or(ways)}.")
    if not faster:
        lines.append("No class of methods is faster here than one machine.")
    return lines


def _or(words: Sequence[str]) -> str:
    if len(words) < 3:
        return " or ".join(words)
    return f"{', '.join(words[:-1])}, or {words[-1]}"


def class_name(consistency: str) -> str:
    """Return a consistency's name in tables."""
    return "local updates" if consistency == "local" else consistency


def times(factor: float) -> str:
    """Format a factor as ``2.4x``: three significant digits, and two decimals at most."""
    return f"{factor:.2f}x" if factor < 10 else f"{factor:.3g}x"


def two_digits(rate: float) -> str:
    return show_rate(float(f"{rate * 8:.2g}") / 8)


def one_worker_a_host(cluster: Cluster) -> bool:
    return all(rack.workers_per_host == 1 for rack in cluster.racks)


def slowest_link(cluster: Cluster) -> float:
    return min(rate for rack in cluster.racks for rate in rack.links)


def faster_but_not_recommended(plan: Plan) -> str:
    """Methods that are faster than the recommended one of their consistency; empty if there are none."""
    recommended = plan.recommended
    faster = [
        f"{one.spec} ({consistency}, {show_seconds(one.step_seconds)})"
        for consistency, one in plan.fastest.items()
        if consistency in recommended
        and recommended[consistency].bytes_sent > one.bytes_sent
    ]
    if not faster:
        return ""
    return (
        "Faster by at most a fifth of a step, but not recommended because they send less of the "
        f"gradient: {', '.join(faster)}."
    )


def smallest_of_each_kind(suggestions: Suggestions) -> list[Suggestion]:
    """Return the smallest change that gains, of suggestions that differ only in a number."""
    found: dict[str, Suggestion] = {}
    for one in suggestions.helps:  # the largest gain first
        found[re.sub(r"\d+", "", one.what)] = one
    return sorted(found.values(), key=lambda one: -one.speedup)
