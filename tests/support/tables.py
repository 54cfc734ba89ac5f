"""Tables of tests whose dimensions hardly interact: a part of each is fast, and all of it slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def sampled(fast: int, rows: Iterable[Any]) -> list[Any]:
    """Rows for `pytest.mark.parametrize`, of which the fast tests try one in *fast*."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=pytest.mark.slow if number % fast else [],
        )
        for number, row in enumerate(rows)
    ]


def crossed(fast: int, *dimensions: Iterable[Any]) -> list[Any]:
    """All rows that have one value of each dimension, for `pytest.mark.parametrize`. Of them one
    in *fast* is tried by the fast tests: a diagonal, on which each value of each dimension is,
    where two dimensions are at least so long."""
    return [
        pytest.param(
            *(value for _, value in row),
            marks=[]
            if sum(place for place, _ in row) % fast == 0
            else pytest.mark.slow,
        )
        for row in itertools.product(*(list(enumerate(d)) for d in dimensions))
    ]
