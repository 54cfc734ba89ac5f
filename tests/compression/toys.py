"""Compressors of kinds that the registry does not have yet: they fit the seam. And what comes back of
tensors through a compressor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression import (
    COMMON,
    Compressor,
    Gather,
    GatheredCompressor,
    Leg,
    SkipsSmallTensors,
    Sum,
)
from paceline.compression.base import (
    Reader,
    dense,
    elements,
    flat,
    put,
    real_type,
    reals,
    sum_uncompressed,
    to_bytes,
)
from paceline.testing.compressor_checks import Workers


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """The largest elements of each bucket, with their places: gathered, biased."""

    density: float = 0.25

    name: ClassVar[str] = "top-k"

    def memory_passes(self, workers):
        return 2.0, 1.0

    def wire_bytes(self, shapes, dtype, workers):
        kept, kind = real_type(shapes, dtype)
        if not kind.is_floating_point:
            return dense(kept, kind)
        return (Leg("gather", 2 * 8 * max(1, int(self.density * elements(kept)))),)

    def average(self, parts, states, place, sent=None):
        parts, sent = reals(parts), None if sent is None else reals(sent)
        if not parts or not parts[0].is_floating_point():
            yield from sum_uncompressed(parts, sent)
            return
        whole = flat(parts).double()
        count = max(1, int(self.density * whole.numel()))
        places = whole.abs().topk(count).indices
        code = torch.cat([places.double(), whole[places]])
        codes = yield Gather(code)
        if sent is not None:
            put(self.opened(code, whole), sent)
        put(sum(self.opened(one, whole) for one in codes), parts)

    def opened(self, code, whole):
        places, values = code.chunk(2)
        return torch.zeros_like(whole).index_add_(0, places.long(), values)


@dataclass(frozen=True, kw_only=True)
class Halves(SkipsSmallTensors, GatheredCompressor):
    """bfloat16, and each worker's by itself."""

    small: int = 100

    name: ClassVar[str] = "halves"

    def memory_passes(self, workers):
        return 2.0, 2.0

    def _size(self, shapes, dtype):
        return 2 * elements(shapes)

    def _encode(self, parts, states):
        return to_bytes(*(part.to(torch.bfloat16) for part in parts))

    def _decode(self, code, parts, dtype, add):
        reader = Reader(code)
        for part in parts:
            value = reader.take(torch.bfloat16, part.numel()).view(part.shape)
            part.add_(value) if add else part.copy_(value)
        reader.end()


@dataclass(frozen=True, kw_only=True)
class RankOne(Compressor):
    """PowerSGD at rank one: two chained sums, and a vector that is equal everywhere."""

    name: ClassVar[str] = "rank-one"
    linear: ClassVar[bool] = True
    rounds: ClassVar[int] = 2
    state: ClassVar[str] = "common"

    def memory_passes(self, workers):
        return 2.0, 2.0

    def wire_bytes(self, shapes, dtype, workers):
        kept, kind = real_type(shapes, dtype)
        if not kind.is_floating_point:
            return dense(kept, kind)
        columns = [shape[-1] if shape else 1 for shape in kept]
        pairs = zip(kept, columns, strict=True)
        rows = sum(elements([shape]) // column for shape, column in pairs)
        return Leg("sum", 8 * rows), Leg("sum", 8 * sum(columns))

    def init_state(self, like, name, rank):
        real = torch.view_as_real(like) if like.is_complex() else like
        columns = self.matrix(real).shape[1] if real.numel() else 0
        generator = torch.Generator().manual_seed(sum(name.encode()))
        q = torch.randn(columns, dtype=torch.double, generator=generator)
        return {COMMON: {"q": q}}

    def matrix(self, part):
        return part.reshape(-1, part.shape[-1] if part.dim() else 1)

    def average(self, parts, states, place, sent=None):
        states = [
            s[COMMON] for part, s in zip(parts, states, strict=True) if part.numel()
        ]
        parts, sent = reals(parts), None if sent is None else reals(sent)
        if not parts or not parts[0].is_floating_point():
            yield from sum_uncompressed(parts, sent)
            return
        given = [self.matrix(part).double() for part in parts]
        rows = [len(m) for m in given]
        left = [m @ s["q"] for m, s in zip(given, states, strict=True)]  # p = M q
        left = (yield Sum(torch.cat(left))).split(rows)
        left = [p / p.norm().clamp(min=1e-300) for p in left]
        right = [m.T @ p for m, p in zip(given, left, strict=True)]  # q = M' p
        if sent is not None:
            for own, p, q in zip(sent, left, right, strict=True):
                own.copy_(torch.outer(p, q).view(own.shape))
        columns = [len(q) for q in right]
        right = (yield Sum(torch.cat(right))).split(columns)
        for part, state, p, q in zip(parts, states, left, right, strict=True):
            part.copy_(torch.outer(p, q).view(part.shape))
            good = q.isfinite().all() & q.any()
            state["q"] = torch.where(good, q, state["q"])

    def inherit_state(self, state, former, workers):
        state[COMMON]["q"].copy_(former[0][COMMON]["q"])


@dataclass(frozen=True, kw_only=True)
class SignAlone(Compressor):
    """signSGD: the signs of all workers, added up. It loses where workers' data differ."""

    name: ClassVar[str] = "sign-alone"
    linear: ClassVar[bool] = True

    def memory_passes(self, workers):
        return 1.0, 1.0

    def wire_bytes(self, shapes, dtype, workers):
        kept, kind = real_type(shapes, dtype)
        return dense(kept, kind)

    def average(self, parts, states, place, sent=None):
        put((yield Sum(flat(reals(parts)).sign())), reals(parts))


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def mean_of(compressor, *values):
    """The mean that workers form, each of which has one tensor."""
    given = [[value] for value in values]
    return Workers(compressor, given[0], len(given)).mean(given)


def through(compressor, values):
    """What one worker's code of a tensor stands for."""
    code = compressor.encode([values], [compressor.init_state(values, "x", 0)])
    decoded = torch.zeros_like(values)
    compressor.decode(code, [decoded])
    return decoded
