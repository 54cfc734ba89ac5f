"""What coding a gradient costs, measured: a compressor's own work, without the network.

The gradient is divided into buckets as DDP does, and each is coded in turn. Collectives are
made up here: some workers code in lock step, and all others have sent what the first one
has. Only what rank 0's compressor does between two collectives is timed, as it does it long
after its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from paceline import bucketing
from paceline.cluster.profiling.gradient_dump import KeptGradients, Named
from paceline.cluster.profiling.timers import stopwatch_for
from paceline.cluster.workload import CodingTimes
from paceline.compression import full_spec
from paceline.interfaces import (
    Asked,
    Coding,
    Compressor,
    Gather,
    Leg,
    Place,
    State,
    Stopwatch,
    Sum,
)
from paceline.interfaces.buckets import kind_of, wire_bytes

SETTLES = 2
"""Gradients that are coded before times are taken: memory is touched for the first time, and
factors of a low rank become those of gradients. Even, as codes may take turns."""
REPEATS = 8
"""Pairs of gradients at most, as codes may take turns."""
SECONDS = 2.0
"""Repeat for as long as this."""
WORKERS = (2, 8)
"""What follows the first codes is timed among so many, and is a line through both."""


@dataclass
class Coded:
    """The coding of one gradient: rank 0's seconds until the *first* codes, until the last ones
    (*between*), and until the end (*last*); and what it sent."""

    first: float = 0.0
    between: float = 0.0
    last: float = 0.0
    legs: list[Leg] = field(default_factory=list)

    @property
    def after(self) -> float:
        """Seconds of all that follows the first codes."""
        return self.between + self.last

    @property
    def seconds(self) -> float:
        """Of all."""
        return self.first + self.after


class Coder:
    """One worker's tensors, buckets and states. *like*: a gradient, in ready order."""

    def __init__(self, compressor: Compressor, like: Named, place: Place) -> None:
        self._compressor, self._place = compressor.settled(), place
        tensors = [tensor for _, tensor in like]
        kinds = [kind_of(tensor) for tensor in tensors]
        sizes = [wire_bytes(tensor) for tensor in tensors]
        self.buckets = bucketing.group("ddp", sizes, kinds)
        self.parts = [torch.empty_like(tensor) for tensor in tensors]
        for bucket in self.buckets:
            members = [tensors[i] for i in bucket]
            lengths = [tensor.numel() for tensor in members]
            buffer = members[0].new_empty(sum(lengths))
            for i, flat in zip(bucket, buffer.split(lengths), strict=True):
                self.parts[i] = flat.view(tensors[i].shape)
        self.states: list[State] = [
            self._compressor.init(part, name, place.rank)
            for part, (name, _) in zip(self.parts, like, strict=True)
        ]

    def begin(self, bucket: Sequence[int], gradient: Sequence[torch.Tensor]) -> Coding:
        """Start to code a bucket of *gradient*, of which this worker has an equal share."""
        parts = [self.parts[i] for i in bucket]
        for i, part in zip(bucket, parts, strict=True):
            torch.div(gradient[i], self._place.workers, out=part)
        states = [self.states[i] for i in bucket]
        return self._compressor.average(parts, states, self._place)


class Coders:
    """*workers* workers with the same gradients, of whom *coding* really code."""

    def __init__(
        self,
        compressor: Compressor,
        like: Named,
        workers: int,
        stopwatch: Stopwatch,
        coding: int = 1,
    ) -> None:
        self._workers, self._stopwatch = workers, stopwatch
        self._coders = [
            Coder(compressor, like, Place(rank=rank, workers=workers))
            for rank in range(coding)
        ]

    @property
    def result(self) -> list[torch.Tensor]:
        """The mean of the last gradient, as rank 0 has it."""
        return self._coders[0].parts

    @torch.no_grad()
    def mean(self, gradient: Sequence[torch.Tensor]) -> Coded:
        """Form the mean of all workers' *gradient*."""
        coded = Coded()
        for bucket in self._coders[0].buckets:
            rounds = [coder.begin(bucket, gradient) for coder in self._coders]
            answers: list[torch.Tensor | None] = [None] * len(rounds)
            while True:
                begin = self._stopwatch.mark()
                asked = [_resume(rounds[0], answers[0])]
                end = self._stopwatch.mark()
                (seconds,) = self._stopwatch.seconds(begin, [end])
                if answers[0] is None:
                    coded.first += seconds
                elif asked[0] is None:
                    coded.last += seconds
                else:
                    coded.between += seconds
                others = zip(rounds[1:], answers[1:], strict=True)
                asked += [_resume(coding, answer) for coding, answer in others]
                messages = [message for message in asked if message is not None]
                if not messages:
                    break
                coded.legs.append(_leg(messages[0]))
                answers = list(_answers(messages, self._workers))
        return coded


def measure_coding(
    compressor: Compressor,
    gradient: Named,
    stopwatch: Stopwatch,
    *,
    usual: bool = False,
) -> CodingTimes:
    """What *compressor* takes for one such *gradient*, long after its start. *usual*: see `repeat`."""
    tensors = [tensor for _, tensor in gradient]
    few, many = (
        repeat(Coders(compressor, gradient, workers, stopwatch), tensors, usual=usual)
        for workers in WORKERS
    )
    per_worker = max(0.0, (many.after - few.after) / (WORKERS[1] - WORKERS[0]))
    return CodingTimes(
        encode=(few.first + many.first) / 2,
        decode=max(0.0, many.after - WORKERS[1] * per_worker),
        decode_per_worker=per_worker,
    )


def coding_times(
    compressors: Iterable[Compressor], kept: KeptGradients, *, usual: bool = False
) -> dict[str, CodingTimes]:
    """What each takes for the first gradient that was kept, with as many threads as training
    had, by its full spec. *usual*: see `repeat`. Raises `UsageError` where no gradient was kept."""
    gradient, threads = kept.read(0)
    watch = stopwatch_for(gradient[0][1].device)
    with threads_set(threads):
        return {
            full_spec(compressor): measure_coding(
                compressor, gradient, watch, usual=usual
            )
            for compressor in compressors
        }


@contextmanager
def threads_set(number: int) -> Iterator[None]:
    """Within it torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def repeat(
    coders: Coders, gradient: Sequence[torch.Tensor], *, usual: bool = False
) -> Coded:
    """Code the same gradient several times: seconds of the quickest two after each other, as
    other work on the machine is no part of them, and the mean gradient's codes, by kind. *usual*: it
    is part of them, and the seconds are those of the median two."""
    for _ in range(SETTLES):
        coders.mean(gradient)
    pairs: list[tuple[Coded, Coded]] = []
    spent = 0.0
    while len(pairs) < REPEATS and spent < SECONDS:
        pair = coders.mean(gradient), coders.mean(gradient)
        spent += sum(run.seconds for run in pair)
        pairs.append(pair)
    sent: dict[str, float] = {}
    for leg in (leg for pair in pairs for run in pair for leg in run.legs):
        sent[leg.kind] = sent.get(leg.kind, 0.0) + leg.size / (2 * len(pairs))
    pairs.sort(key=lambda pair: sum(run.seconds for run in pair))
    one, two = pairs[len(pairs) // 2 if usual else 0]
    return Coded(
        first=(one.first + two.first) / 2,
        between=(one.between + two.between) / 2,
        last=(one.last + two.last) / 2,
        legs=[Leg(kind, size) for kind, size in sent.items()],  # type: ignore[arg-type]
    )


def _resume(coding: Coding, answer: torch.Tensor | None) -> Asked | None:
    try:
        return next(coding) if answer is None else coding.send(answer)
    except StopIteration:
        return None


def _answers(asked: Sequence[Asked], workers: int) -> list[torch.Tensor]:
    """What a collective gives back to each who codes; *workers* are those and others, who
    have sent what rank 0 has."""
    codes = [message.code for message in asked]
    others = workers - len(codes)
    if isinstance(asked[0], Sum):
        total = codes[0].clone()
        for code in codes[1:]:
            total.add_(code)
        total.add_(codes[0], alpha=others)
        return [code.copy_(total) for code in codes]
    everyone = codes + codes[:1] * others
    if isinstance(asked[0], Gather):
        return [torch.stack(everyone) for _ in codes]
    rows = [code.view(workers, -1) for code in everyone]
    return [torch.stack([row[rank] for row in rows]) for rank in range(len(codes))]


def _leg(message: Asked) -> Leg:
    size = message.code.numel() * message.code.element_size()
    if isinstance(message, Sum):
        return Leg("sum", size)
    return Leg("gather" if isinstance(message, Gather) else "exchange", size)
