"""Groups of workers: one phase of a plan, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import UsageError

Groups = tuple[tuple[int, ...], ...]
"""One phase: who averages with whom in a step. A partition of the workers, each group
sorted, groups sorted by their first member."""


def in_order(groups: Iterable[Iterable[int]]) -> Groups:
    """The same groups as every worker writes them."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def cut(workers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive groups of *size* workers: as many as hold them all, and as equal as can
    be. None has fewer than two (an odd worker makes a group of three), unless there is only
    one worker."""
    count = max(1, min(-(-len(workers) // size), len(workers) // 2))
    least, larger = divmod(len(workers), count)
    groups, start = [], 0
    for number in range(count):
        end = start + least + (number < larger)
        groups.append(workers[start:end])
        start = end
    return groups


def check_partition(groups: Groups, members: Sequence[int], where: str) -> None:
    """Raises `UsageError` unless each of *members* is in one group, and none is alone."""
    seen = sorted(worker for group in groups for worker in group)
    if seen != sorted(members):
        twice = sorted({worker for worker in seen if seen.count(worker) > 1})
        missing = sorted(set(members).difference(seen))
        strange = sorted(set(seen).difference(members))
        wrong = [
            f"{what} {_few(workers)}"
            for what, workers in (
                ("twice:", twice),
                ("in none:", missing),
                ("no worker:", strange),
            )
            if workers
        ]
        raise UsageError(
            f"{where}: expected each of the {len(members)} workers in one group, got "
            f"{'; '.join(wrong)}"
        )
    alone = [group[0] for group in groups if len(group) == 1]
    if alone and len(members) > 1:
        raise UsageError(
            f"{where}: expected groups of two or more, got worker {_few(alone)} alone: it "
            "would average with nobody; put it in another group"
        )


def parts(phases: Iterable[Groups]) -> list[list[int]]:
    """Who reaches whom over these phases: one part if everybody reaches everybody."""
    leader: dict[int, int] = {}

    def find(worker: int) -> int:
        while leader.setdefault(worker, worker) != worker:
            leader[worker] = worker = leader[leader[worker]]
        return worker

    for groups in phases:
        for group in groups:
            for worker in group:
                first, second = sorted((find(group[0]), find(worker)))
                leader[second] = first
    found: dict[int, list[int]] = {}
    for worker in sorted(leader):
        found.setdefault(find(worker), []).append(worker)
    return list(found.values())


def _few(workers: Sequence[int]) -> str:
    """Some of them, for people."""
    text = ", ".join(str(worker) for worker in workers[:5])
    return text if len(workers) <= 5 else f"{text} and {len(workers) - 5} more"
