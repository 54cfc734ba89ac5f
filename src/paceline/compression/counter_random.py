"""Chance that a compressor draws by itself: the n-th number is a function of a key and n.

Counter-based, so nothing lives on but a count, and nobody else's random numbers change:
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014, figure 16) of key + n times the golden ratio. The same on every device.

Each tensor has a stream of keys of its own on each worker, and one that all workers share,
and counts what was drawn. A bucket draws from its first tensor's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from paceline.interfaces import COMMON, State

SEED = 0
"""Of all streams."""

A_WORD = 4
"""Numbers that are made of one word of 64 bits."""


@dataclass(frozen=True)
class Chance:
    """Numbers between 0 and 1, in steps of 2^-16; *key* has 64 bits, with a sign."""

    key: int

    def add_to(self, values: torch.Tensor, begin: int) -> None:
        """Add a number of its own to each of *values* (contiguous): those from the one with
        number *begin* on. That and how many there are divide by `A_WORD`."""
        steps = _steps(values.numel() // A_WORD, values.device)
        z = steps + _signed(self.key + begin // A_WORD * _GOLDEN)
        shifted = torch.empty_like(z)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            torch.bitwise_right_shift(z, shift, out=shifted)
            shifted.bitwise_and_(2 ** (64 - shift) - 1)  # torch shifts the sign in
            z.bitwise_xor_(shifted)
            if factor != 1:
                z.mul_(factor)
        drawn = z.view(torch.int16).view(values.shape)  # from -2^15 to 2^15 - 1
        values.add_(drawn, alpha=2.0**-16).add_(0.5 + 2.0**-17)


def stream(name: str, rank: int) -> State:
    """What a tensor keeps so that nothing is drawn twice."""
    common = {"stream": _key(SEED, name), "draws": 0}
    return {"stream": _key(SEED, name, rank), COMMON: common}


def draw(states: Sequence[State]) -> tuple[Chance, Chance]:
    """A bucket's next numbers: this worker's own, and those that all workers share."""
    first = states[0]
    own, common = first["stream"], first[COMMON]
    draws = common["draws"]
    for state in states:
        state[COMMON]["draws"] += 1
    return Chance(_key(own, draws)), Chance(_key(common["stream"], draws))


def go_on(state: State, former: Sequence[State]) -> None:
    """Numbers that *former* workers have drawn are not drawn again."""
    if former:
        state[COMMON]["draws"] = max(old[COMMON]["draws"] for old in former)


def _key(*what: int | str) -> int:
    """64 bits, with a sign."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _signed(number: int) -> int:
    """Its lowest 64 bits, as torch has them."""
    return (number + 2**63) % 2**64 - 2**63


def _steps(words: int, device: torch.device) -> torch.Tensor:
    """Multiples of the golden ratio."""
    if device.type == "cpu" and words <= _MANY:
        return _many_steps()[:words]
    return torch.arange(words, dtype=torch.int64, device=device).mul_(_GOLDEN)


@cache
def _many_steps() -> torch.Tensor:
    return torch.arange(_MANY, dtype=torch.int64).mul_(_GOLDEN)


_MANY = 2**16
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
