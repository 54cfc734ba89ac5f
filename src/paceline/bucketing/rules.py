"""In which pieces the gradient travels.

`plan` turns gradients' sizes, their ready times and the cost of an all-reduce into bucket
lengths; `timeline` says when the last all-reduce of a plan ends. Both are used alike by
`distribute`, by the planner and by the benchmarks that hold them against virtual time.

==========  ===============================================================================
wfbp        a bucket per tensor
single      one bucket
ddp         PyTorch DDP's: 1 MiB, then 25 MiB
mg-wfbp     the paper's greedy rule (Shi et al., INFOCOM 2019), from measured times
optimal     exact from measured times, for one lane and any cost
3+5+2       these lengths: 3 tensors, then 5, then 2, in gradient-ready order
==========  ===============================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

from paceline.bucketing.cost_models import AffineCost, Cost, TableCost, fit
from paceline.bucketing.fixed_rules import ddp, single, wfbp
from paceline.bucketing.measured_rules import bound, mg_wfbp, optimal
from paceline.bucketing.timeline import check, check_sizes, finish, finish_buckets
from paceline.errors import UsageError, unknown

FIXED: dict[str, Callable[[Sequence[float]], list[int]]] = {
    "ddp": ddp,
    "single": single,
    "wfbp": wfbp,
}
MEASURED = ("mg-wfbp", "optimal")
RULES = (*FIXED, *MEASURED)


def plan(
    rule: str,
    gradient_bytes: Sequence[float],
    ready_seconds: Sequence[float] = (),
    cost: Cost | None = None,
    *,
    kinds: Sequence[Hashable] | None = None,
    lanes: int = 1,
) -> list[int]:
    """Bucket lengths in gradient-ready order.

    *ready_seconds* count from the start of the step, and *cost* gives the seconds of an
    all-reduce of so many bytes; fixed rules need neither. A bucket never spans two
    *kinds*. *lanes*: all-reduces that are under way at a time. Raises `UsageError` for an
    unknown rule, and for sizes, times and kinds that cannot be.
    """
    check_rule(rule)
    check_sizes(gradient_bytes)
    if kinds is not None and len(kinds) != len(gradient_bytes):
        raise UsageError(
            f"kinds: expected one per tensor, {len(gradient_bytes)}, got {len(kinds)}"
        )
    runs = _runs(kinds or [None] * len(gradient_bytes))
    if rule not in MEASURED:
        return _split(_fixed(rule, gradient_bytes), runs, given=rule not in FIXED)
    if cost is None:
        raise UsageError(f"bucket rule {rule!r}: expected ready_seconds and a cost")
    check(gradient_bytes, ready_seconds, lanes)
    if not gradient_bytes:
        return []
    totals = list(itertools.accumulate(gradient_bytes))
    greedy = mg_wfbp(
        gradient_bytes, ready_seconds, fit(cost, [*gradient_bytes, *totals]), runs
    )
    if rule == "mg-wfbp":
        return greedy
    others = [_split(fixed(gradient_bytes), runs) for fixed in FIXED.values()]
    return optimal(gradient_bytes, ready_seconds, cost, runs, lanes, [greedy, *others])


def check_rule(rule: str) -> str:
    """Return *rule* if it exists; raises `UsageError` naming those that do."""
    if rule not in RULES and _lengths(rule) is None:
        known = unknown("bucket rule", rule, RULES)
        raise UsageError(f"{known} Or bucket lengths, such as '3+5+2'.")
    return rule


def group(
    rule: str,
    sizes: Sequence[float],
    kinds: Sequence[Hashable],
    ready: Sequence[float] = (),
    cost: Cost | None = None,
    *,
    lanes: int = 1,
) -> list[list[int]]:
    """Buckets as lists of positions in ready order, also where kinds alternate.

    Each kind is planned by itself, and buckets are ordered by the tensor that completes
    them. Where times are known, and it ends earlier, buckets follow the ready order
    instead, and end wherever the kind changes. Alternating kinds are planned by trial, not
    exactly; ``optimal`` still never ends later than another rule.
    """
    if _lengths(check_rule(rule)) is not None:
        return _positions(plan(rule, sizes, kinds=kinds))
    members: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        members.setdefault(kind, []).append(position)
    groups: list[list[int]] = []
    for positions in members.values():
        lengths = plan(
            rule,
            [sizes[p] for p in positions],
            [ready[p] for p in positions] if cost else (),
            cost,
            lanes=lanes,
        )
        groups += [[positions[i] for i in part] for part in _positions(lengths)]
    groups.sort(key=lambda positions: positions[-1])
    if cost is None or len(members) < 2 or rule not in MEASURED:
        return groups
    in_order = _positions(plan(rule, sizes, ready, cost, kinds=kinds, lanes=lanes))
    candidates = [groups, in_order]
    if rule == "optimal":  # each kind's plan knows nothing of the others' messages
        others = [other for other in RULES if other != rule]
        candidates += [group(o, sizes, kinds, ready, cost, lanes=lanes) for o in others]
    return min(
        candidates, key=lambda g: finish_groups(g, sizes, ready, cost, lanes=lanes)
    )


def finish_groups(
    groups: Sequence[Sequence[int]],
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    *,
    lanes: int = 1,
) -> float:
    """`finish` for what `group` gives."""
    totals = [sum(sizes[p] for p in positions) for positions in groups]
    times = [ready[positions[-1]] for positions in groups]
    return finish_buckets(totals, times, cost, lanes=lanes)


def _fixed(rule: str, sizes: Sequence[float]) -> list[int]:
    if rule in FIXED:
        return FIXED[rule](sizes)
    lengths = _lengths(rule)
    assert lengths is not None
    if sum(lengths) != len(sizes):
        raise UsageError(
            f"bucketing {rule!r}: expected lengths that sum to the {len(sizes)} gradients of "
            f"the model, got {sum(lengths)}"
        )
    return lengths


def _lengths(rule: str) -> list[int] | None:
    """The lengths that ``"3+5+2"`` writes; None if it writes none."""
    words = rule.split("+")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        return None
    return [int(word) for word in words]


def _positions(lengths: Sequence[int]) -> list[list[int]]:
    edges = [0, *itertools.accumulate(lengths)]
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


def _runs(kinds: Sequence[Hashable]) -> list[int]:
    """For each tensor, where the run of tensors of its kind began."""
    runs: list[int] = []
    for i, kind in enumerate(kinds):
        runs.append(runs[-1] if i and kind == kinds[i - 1] else i)
    return runs


def _split(
    lengths: Sequence[int], runs: Sequence[int], given: bool = False
) -> list[int]:
    """*lengths*, cut wherever the kind changes; *given* lengths may not need that."""
    result = []
    for positions in _positions(lengths):
        parts = [
            len(list(same))
            for _, same in itertools.groupby(positions, runs.__getitem__)
        ]
        if given and len(parts) > 1:
            raise UsageError(
                f"bucketing {'+'.join(map(str, lengths))!r}: the bucket of tensors "
                f"{positions[0]} to {positions[-1]} mixes dtypes or devices"
            )
        result += parts
    return result


__all__ = [
    "FIXED",
    "MEASURED",
    "RULES",
    "AffineCost",
    "Cost",
    "TableCost",
    "bound",
    "check_rule",
    "ddp",
    "finish",
    "finish_groups",
    "group",
    "plan",
    "single",
    "wfbp",
]
