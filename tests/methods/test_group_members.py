"""Groups by hand, as text: what is read is what was written, and mistakes are told."""

import random

import pytest

from paceline.errors import UsageError
from paceline.methods.group_members import members_text, read_members


def random_groups(draw, workers):
    """By rank, its group; numbered in the order of first ranks, none empty."""
    of = [draw.randrange(draw.randint(1, workers)) for _ in range(workers)]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(of))}
    return tuple(numbers[group] for group in of)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_written_is_read(seed):
    draw = random.Random(seed)
    workers = draw.randint(1, 20)
    of = random_groups(draw, workers)
    groups = read_members(members_text(of), workers)
    assert groups.of == of
    assert groups.servers == max(of) + 1
    for rank, group in enumerate(of):
        assert rank in groups.members(group)


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ((0, 0, 0, 0), "0-3"),
        ((0, 0, 1, 1), "0-1+2-3"),
        ((0, 1, 0, 1), "0.2+1.3"),
        ((0, 1, 1, 0, 0), "0.3-4+1-2"),
        ((0,), "0"),
    ],
)
def test_ranks_that_follow_each_other_are_a_range(of, text):
    assert members_text(of) == text
    assert read_members(text, len(of)).of == of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-3+3-7", "rank 3 is named twice"),
        ("0-3+2", "rank 2 is named twice"),
        ("0-3.1+4-7", "rank 1 is named twice"),
        ("0-3+5-7", "rank 4 is in no group"),
        ("0-7+", "joined by"),
        ("0-3+4-8", "ranks 0 to 7.*'4-8'"),
        ("3-0+4-7", "ranges that rise.*'3-0'"),
        ("0-3/4-7", "such as 0-3.8.4-7, got '0-3/4-7'"),
        ("a", "got 'a'"),
        ("-1", "got '-1'"),
        ("0+1+2+3+4+5+6+7+8", "8 groups.*got 9"),
    ],
)
def test_mistakes_are_told(text, words):
    with pytest.raises(UsageError, match=words):
        read_members(text, 8)
