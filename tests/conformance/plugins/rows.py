"""The newcomers: toys, each one file of at most 75 lines and one row here.

A toy file imports what a method (a compressor, a collective) may import. Nothing else of
paceline knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.collectives.registry import COLLECTIVES
from paceline.compression import COMPRESSORS
from paceline.methods import METHODS
from paceline.testing import Case
from tests.conformance.plugins.toys.common_scale import CommonScale
from tests.conformance.plugins.toys.every_fourth import EveryFourth
from tests.conformance.plugins.toys.grid import Grid
from tests.conformance.plugins.toys.largest import Largest
from tests.conformance.plugins.toys.line import Line
from tests.conformance.plugins.toys.pairs import Pairs


@dataclass(frozen=True)
class Toy:
    """A class, the registry that it stands in, and how the kit tries it."""

    registry: dict[str, Any]
    what: Any
    case: Case

    @property
    def name(self) -> str:
        return str(self.what.name)


TOYS = (
    Toy(
        METHODS, EveryFourth, Case(method="every-fourth", learning_rate=0.3, steps=100)
    ),
    Toy(METHODS, Pairs, Case(method="pairs", learning_rate=0.3, steps=200)),
    Toy(COMPRESSORS, Grid, Case(method="bsp:compression=grid", lossy=2**-18)),
    Toy(
        COMPRESSORS,
        Largest,
        Case(method="bsp:compression=largest", learning_rate=0.3, steps=150, lossy=0.5),
    ),
    Toy(
        COMPRESSORS,
        CommonScale,
        Case(method="bsp:compression=common-scale", lossy=2**-13),
    ),
    Toy(COLLECTIVES, Line, Case(method="bsp:collective=line")),
)


def register() -> None:
    """What a row in each registry would do."""
    for toy in TOYS:
        assert toy.name not in toy.registry, f"{toy.name} is there already"
        toy.registry[toy.name] = toy.what


@contextmanager
def registered() -> Iterator[None]:
    """Within it the registries have the toys."""
    register()
    try:
        yield
    finally:
        for toy in TOYS:
            del toy.registry[toy.name]
