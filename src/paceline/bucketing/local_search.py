"""Small changes to a plan whose messages are waited for in the order of their use.

Only what moves before the latest bucket, since the wire last rested, can make it less late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from paceline.bucketing.exposed_time import Group, Piece, Problem
from paceline.bucketing.message_search import MOST_PIECES, joined_neighbours

FEW = 12
"""Among so many messages, any two are merged; among more, those that follow each other."""

PARTS = (0.5, 0.25, 0.75)
"""Where a message is cut, beside where something more urgent is ready."""


def neighbours(problem: Problem, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Plans that differ little from this one, likely improvements first."""
    late = problem.lateness(pieces)
    worst = late.index(max(late))
    first = _busy_since(problem, pieces, worst)
    moves = (
        _later(pieces, first, worst),
        _cut(problem, pieces, first, worst),
        _merged(problem, pieces, first, worst),
        _parted(problem, pieces, first, worst),
        _earlier(pieces, first, worst),
        _gathered(pieces, first, worst),
    )
    for move in moves:
        for changed in move:
            if _in_sequence(changed):
                yield joined_neighbours(problem, changed)


def _busy_since(problem: Problem, pieces: Sequence[Piece], until: int) -> int:
    """The first message since the wire last rested before that number *until*."""
    ends = problem.ends(pieces)
    first, free = 0, 0.0
    for number, (piece, end) in enumerate(zip(pieces[: until + 1], ends, strict=False)):
        if piece.group.ready >= free:
            first = number
        free = max(free, end)
    return first


def _in_sequence(pieces: Sequence[Piece]) -> bool:
    """Whether no second half goes before its first."""
    scattered: set[Group] = set()
    for piece in pieces:
        if piece.half == "scatter":
            scattered.add(piece.group)
        elif piece.half == "gather" and piece.group not in scattered:
            return False
    return True


def _moved(pieces: Sequence[Piece], number: int, to: int) -> list[Piece]:
    """With one message taken out and put where number *to* then is."""
    changed = list(pieces)
    changed.insert(to, changed.pop(number))
    return changed


def _later(pieces: Sequence[Piece], first: int, worst: int) -> Iterator[list[Piece]]:
    """What is less urgent goes after the latest: one message, or all of them."""
    urgent = pieces[worst].group.due
    block = pieces[first:worst]
    less = [piece for piece in block if piece.group.due > urgent]
    if less:
        rest = [piece for piece in block if piece.group.due <= urgent]
        yield [*pieces[:first], *rest, pieces[worst], *less, *pieces[worst + 1 :]]
    for number in reversed(range(first, worst)):
        if pieces[number].group.due > urgent:
            yield _moved(pieces, number, worst)


def _earlier(pieces: Sequence[Piece], first: int, worst: int) -> Iterator[list[Piece]]:
    """The latest goes before others; others go before those that are ready later."""
    for number in reversed(range(first, worst)):
        yield _moved(pieces, worst, number)
    for number in range(first, worst):
        yield _moved(pieces, number + 1, number)


def _cut(
    problem: Problem, pieces: Sequence[Piece], first: int, worst: int
) -> Iterator[list[Piece]]:
    """A part of what is less urgent goes after the latest, or after the next that is more
    urgent."""
    ends = problem.ends(pieces)
    for number in reversed(range(first, worst)):
        piece = pieces[number]
        if piece.half != "all" or piece.part < 2 / MOST_PIECES:
            continue
        urgent = [
            other
            for other in range(number + 1, worst + 1)
            if pieces[other].group.due < piece.group.due
        ]
        if not urgent:
            continue
        start = ends[number] - piece.seconds
        wire = max(piece.seconds - problem.cost(0.0), 1e-30)
        wanted = [
            1 - (ends[number] - pieces[other].group.ready) / wire
            for other in {urgent[0], worst}
            if start < pieces[other].group.ready < ends[number]
        ]
        for part in (*wanted, *PARTS):
            if not 1 / MOST_PIECES < part < 1 - 1 / MOST_PIECES:
                continue
            one = problem.piece(piece.group, piece.part * part)
            two = problem.piece(piece.group, piece.part - one.part)
            for behind in {urgent[0], worst}:
                yield [
                    *pieces[:number],
                    one,
                    *pieces[number + 1 : behind + 1],
                    two,
                    *pieces[behind + 1 :],
                ]


def _merged(
    problem: Problem, pieces: Sequence[Piece], first: int, worst: int
) -> Iterator[list[Piece]]:
    """Two groups become one, which goes where the first or the last of them went."""
    around = pieces[first : worst + 2]
    pairs = combinations(around, 2) if len(around) <= FEW else pairwise(around)
    for one, two in pairs:
        if one.group is two.group or one.group.kind != two.group.kind:
            continue
        pair = (one.group, two.group)
        group = problem.group(one.group.positions + two.group.positions)
        kept = {piece.half for piece in pieces if piece.group in pair}
        for last in (True, False):
            changed = list(pieces)
            for half in kept:
                places = [
                    number
                    for number, piece in enumerate(changed)
                    if piece.group in pair and piece.half == half
                ]
                # A first half needs all its gradients; a second one is of use at once.
                at_end = last if half == "all" else half == "scatter"
                at = places[-1] if at_end else places[0]
                changed = [
                    problem.piece(group, half=half) if number == at else piece
                    for number, piece in enumerate(changed)
                    if number == at or number not in places
                ]
            yield changed


def _parted(
    problem: Problem, pieces: Sequence[Piece], first: int, worst: int
) -> Iterator[list[Piece]]:
    """A group of several tensors becomes two, the first of which is ready earlier."""
    tried: set[Group] = set()
    for number in (first, worst, *range(first + 1, worst)):
        group = pieces[number].group
        count = len(group.positions)
        if group in tried or count < 2:
            continue
        tried.add(group)
        for at in sorted({count // 2, count - 1, 1}):
            parts = [
                problem.group(group.positions[:at]),
                problem.group(group.positions[at:]),
            ]
            for order in (parts, parts[::-1]):
                changed: list[Piece] = []
                done = set()
                for piece in pieces:
                    if piece.group is not group:
                        changed.append(piece)
                    elif piece.half not in done:
                        done.add(piece.half)
                        changed += [problem.piece(p, half=piece.half) for p in order]
                yield changed


def _gathered(pieces: Sequence[Piece], first: int, worst: int) -> Iterator[list[Piece]]:
    """Parts of one group that were sent apart go together: a start-up less."""
    last_of: dict[Group, int] = {}
    for number in range(worst + 1):
        piece = pieces[number]
        if piece.half != "all":
            continue
        before = last_of.get(piece.group)
        if before is not None and number >= first:
            yield _moved(pieces, number, before + 1)
            yield _moved(pieces, before, number - 1)
        last_of[piece.group] = number
