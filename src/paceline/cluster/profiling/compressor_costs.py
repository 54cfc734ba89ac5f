"""What each compressor costs and gains on one model's real gradients.

Seconds are those of coding (`paceline.cluster.profiling.compressors`), bytes those of the codes
themselves, indices and scales included. Beside them stands a ring all-reduce of the whole
gradient as it is, S bytes, among n workers with links of B bytes a second, without start-ups:

    dense       2 (n - 1) / n S / B
    compressed  coding + (2 (n - 1) / n sums + (n - 1) gathers + (n - 1) / n exchanges) / B

where sums, gathers and exchanges are the bytes of a worker's own codes that are all-reduced,
gathered by all, or sent in parts to each. It pays below the B at which both are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.cluster.profiling.compressors import Coders, repeat, threads_set
from paceline.cluster.profiling.gradient_dump import KeptGradients, Named
from paceline.cluster.profiling.timers import stopwatch_for
from paceline.compression import make
from paceline.errors import UsageError
from paceline.interfaces import Compressor, Leg
from paceline.interfaces.buckets import wire_bytes


@dataclass(frozen=True, kw_only=True)
class Price:
    """One compressor's row. *code_bytes*: a worker's own codes of a gradient of *dense_bytes*;
    *traffic_bytes*: what a worker sends for them, where dense it sends *dense_traffic_bytes*.
    *encode_seconds*: until the last code is sent, *decode_seconds*: of all after that.
    *error*: the norm of what a mean is beside the gradient, over the gradient's, in the first
    step; *error_of_sum*: the same of the sums of means and of gradients over *steps* steps,
    with what the compressor keeps in between. *pays_below*: bytes a second; None: nowhere."""

    compression: str
    workers: int
    dense_bytes: int
    dense_traffic_bytes: float
    code_bytes: float
    traffic_bytes: float
    encode_seconds: float
    decode_seconds: float
    error: float
    error_of_sum: float
    steps: int
    pays_below: float | None

    @property
    def ratio(self) -> float:
        """Bytes of the gradient over those of its codes."""
        return self.dense_bytes / self.code_bytes


@dataclass(frozen=True, kw_only=True)
class Unsuited:
    """A compressor that has no row, and why."""

    compression: str
    reason: str


def traffic(legs: Iterable[Leg], workers: int) -> float:
    """Bytes that each of *workers* sends for codes of these bytes."""
    n = workers
    parts = {"sum": 2 * (n - 1) / n, "gather": n - 1, "exchange": (n - 1) / n}
    return math.fsum(parts[leg.kind] * leg.size for leg in legs)


def pays_below(dense: float, compressed: float, coding: float) -> float | None:
    """The bandwidth at which *coding* seconds are as long as the bytes that they save."""
    saved = dense - compressed
    if saved <= 0:
        return None
    return saved / coding if coding else math.inf


def price(
    compressors: Sequence[str],
    kept: KeptGradients,
    workers: int,
    begins: Callable[[str], object] = lambda spec: None,
) -> Iterator[Price | Unsuited]:
    """A row for each spec, as it is found; *begins* is told each first. Raises `UsageError`
    for specs that mean nothing, and where no gradients were kept."""
    made = [(text, make(text)) for text in compressors]
    steps = [step for step in range(len(kept)) if _is_finite(kept.read(step)[0])]
    if not steps:
        kept.read(0)  # which says it, where there is none at all
        raise UsageError(
            f"none of the {len(kept)} gradients that were seen is finite: expected some "
            "that are, to code them; with a GradScaler, start at a smaller scale"
        )
    optimizer = kept.optimizer()
    with threads_set(kept.read(steps[0])[1]):
        for text, compressor in made:
            begins(text)
            try:
                if optimizer is not None:
                    compressor.suits(optimizer)
                yield _price(text, compressor, kept, steps, workers)
            except UsageError as error:
                yield Unsuited(compression=text, reason=str(error))


def _price(
    text: str,
    compressor: Compressor,
    kept: KeptGradients,
    steps: Sequence[int],
    workers: int,
) -> Price:
    like, _ = kept.read(steps[0])
    tensors = [tensor for _, tensor in like]
    watch = stopwatch_for(tensors[0].device)
    coded = repeat(Coders(compressor, like, workers, watch), tensors)
    dense = sum(wire_bytes(tensor) for tensor in tensors)
    as_it_is = Leg("sum", dense)
    if coded.legs == [as_it_is]:
        raise UsageError(
            "sends every tensor of this model as it is: they are too small for it, or of a "
            "type or shape that it does not code"
        )
    # Where each has a part of its own to code, others must be real ones, too.
    in_parts = any(leg.kind == "exchange" for leg in coded.legs)
    real = Coders(compressor, like, 2, watch, coding=2 if in_parts else 1)
    first, all_of_them = _errors(real, kept, steps)
    sent, would_be = traffic(coded.legs, workers), traffic([as_it_is], workers)
    return Price(
        compression=text,
        workers=workers,
        dense_bytes=dense,
        dense_traffic_bytes=would_be,
        code_bytes=math.fsum(leg.size for leg in coded.legs),
        traffic_bytes=sent,
        encode_seconds=coded.first + coded.between,
        decode_seconds=coded.last,
        error=first,
        error_of_sum=all_of_them,
        steps=len(steps),
        pays_below=pays_below(would_be, sent, coded.seconds),
    )


def _errors(
    coders: Coders, kept: KeptGradients, steps: Sequence[int]
) -> tuple[float, float]:
    """Of the mean of the first step, and of the sum over all *steps*."""
    first = 0.0
    differences: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for step in steps:
        gradient = [tensor for _, tensor in kept.read(step)[0]]
        coders.mean(gradient)
        pairs = zip(coders.result, gradient, strict=True)
        off = [mean - tensor for mean, tensor in pairs]
        if not sums:
            first = _ratio(off, gradient)
            differences, sums = off, [tensor.clone() for tensor in gradient]
            continue
        for difference, total, more, tensor in zip(
            differences, sums, off, gradient, strict=True
        ):
            difference.add_(more)
            total.add_(tensor)
    return first, _ratio(differences, sums)


def _ratio(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> float:
    """Of two norms over all tensors; 0 where both are."""
    norm = _norm(those)
    return _norm(these) / norm if norm else 0.0


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    wide = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
    norms = [torch.linalg.vector_norm(tensor).double().cpu() for tensor in wide]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _is_finite(gradient: Named) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for _, tensor in gradient)
