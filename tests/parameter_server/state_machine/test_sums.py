"""Sums over workers: the bits, whoever is fast."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from paceline.interfaces.buckets import stand_in_for
from paceline.parameter_server.state_machine.sums import Sum

PARTS = [
    torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(4)
]


def summed(arrivals: tuple[int, ...], operation: str = "sum") -> Sum:
    total = Sum(operation)
    for rank in arrivals:
        total.add(rank, PARTS[rank].clone(), range(4))
    return total


@pytest.mark.parametrize("arrivals", list(permutations(range(4))))
def test_in_rank_order_bits_do_not_depend_on_arrival(arrivals: tuple[int, ...]) -> None:
    expected = PARTS[0].clone()
    for part in PARTS[1:]:
        expected += part
    assert torch.equal(summed(arrivals).result(), expected)


def test_the_maximum() -> None:
    expected = torch.stack(PARTS).amax(0)
    assert torch.equal(summed((2, 0, 3, 1), "max").result(), expected)


def test_early_parts_wait() -> None:
    total = Sum()
    total.add(3, PARTS[3].clone(), range(4))
    total.add(1, PARTS[1].clone(), range(4))
    assert total.added_bytes == 0
    assert not total.is_complete(range(4))


def test_who_is_not_expected_any_more_is_not_waited_for() -> None:
    total = Sum()
    total.add(2, PARTS[2].clone(), range(3))
    total.add(1, PARTS[1].clone(), range(3))
    total.settle([1, 2])
    assert total.is_complete([1, 2])
    assert torch.equal(total.result(), PARTS[1] + PARTS[2])


def test_what_came_counts_also_when_its_rank_is_gone() -> None:
    total = Sum()
    total.add(0, PARTS[0].clone(), [0, 1])
    total.add(1, PARTS[1].clone(), [1])
    assert torch.equal(total.result(), PARTS[0] + PARTS[1])


def test_an_unfinished_sum_has_no_result() -> None:
    with pytest.raises(AssertionError, match="nothing was added"):
        Sum().result()


def test_a_sum_of_stand_ins_is_one() -> None:
    total = Sum()
    for rank in range(2):
        total.add(rank, stand_in_for(10**6, torch.ones(2)), range(2))
    assert total.added_bytes == 10**6
    assert total.result().stands_for_bytes == 10**6  # type: ignore[attr-defined]
