"""Measures the cost of compressing a gradient: a compressor's own work, without the network.

The gradient is divided into DDP's buckets, and each is compressed in turn. This process imitates
collectives: some workers compress in lockstep, and all other workers send the same as the first
one. Only the work of rank 0's compressor between two collectives is timed, in its steady state.

`coding_times_of_busy` measures with all cores busy. A core that works alone is faster than one
beside other busy ones. They share a cache, the memory and its bus, and the power, and may be two
threads of one core. Workers that share a machine compress at the same time, as their gradients are
ready at the same time.

`compressor_costs` compares a compressor with no compression. The bytes of its compressed gradient
include indices and scales. The alternative is a ring all-reduce of the uncompressed gradient, S
bytes, among n workers with links of B bytes per second, without start-ups:

    dense       2 (n - 1) / n S / B
    compressed  coding + (2 (n - 1) / n sums + (n - 1) gathers + (n - 1) / n exchanges) / B

Sums, gathers and exchanges are the bytes of a worker's own compressed gradient that are
all-reduced, gathered by all, or sent in parts to each worker. Compression pays below the B at which
both times are equal.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from threading import Barrier, BrokenBarrierError

import torch

from paceline.bucketing.rules import plan_buckets
from paceline.cluster.profiling.step_profiler import GradientDump, Named
from paceline.cluster.profiling.timers import stopwatch_for
from paceline.cluster.workload import CompressorTimes
from paceline.compression import (
    Gather,
    GradientCompression,
    Leg,
    RankInfo,
    Request,
    Rounds,
    State,
    Sum,
    full_spec,
    make,
)
from paceline.errors import UsageError
from paceline.interfaces import Stopwatch
from paceline.interfaces.buckets import kind_of, wire_bytes
from paceline.runtimes.python_internals import end_pool
from paceline.timeouts import timeouts
from paceline.transport.liveness import end_with_parent, without_interrupts

SETTLES = 2
"""Gradients that are compressed before times are taken. Memory is then touched for the first time,
and low-rank factors converge to those of gradients. The number is even, as compressors may
alternate."""
REPEATS = 8
"""The most pairs of gradients; pairs, as compressors may alternate."""
SECONDS = 2.0
"""Seconds for which the measurement is repeated."""
WORKERS = (2, 8)
"""The two numbers of workers for which decoding is timed; a line through both gives its cost per
worker."""


@dataclass
class CompressionRun:
    """The compression of one gradient: rank 0's seconds, and the bytes that it sent.

    Attributes:
        first: Seconds until the first compressed tensors.
        between: Seconds from there until the last ones.
        last: Seconds from there until the end.
    """

    first: float = 0.0
    between: float = 0.0
    last: float = 0.0
    legs: list[Leg] = field(default_factory=list)

    @property
    def after(self) -> float:
        """Seconds of everything after the first compressed tensors."""
        return self.between + self.last

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return self.first + self.after


class Coder:
    """One worker's tensors, buckets and states. *like* is a gradient, in ready order."""

    def __init__(
        self, compression: GradientCompression, like: Named, place: RankInfo
    ) -> None:
        self._compression, self._place = compression.steady_state(), place
        tensors = [tensor for _, tensor in like]
        kinds = [kind_of(tensor) for tensor in tensors]
        sizes = [wire_bytes(tensor) for tensor in tensors]
        self.buckets = plan_buckets("ddp", sizes, kinds)
        self.parts = [torch.empty_like(tensor) for tensor in tensors]
        for bucket in self.buckets:
            members = [tensors[i] for i in bucket]
            lengths = [tensor.numel() for tensor in members]
            buffer = members[0].new_empty(sum(lengths))
            for i, flat in zip(bucket, buffer.split(lengths), strict=True):
                self.parts[i] = flat.view(tensors[i].shape)
        self.states: list[State] = [
            self._compression.init_state(part, name, place.rank)
            for part, (name, _) in zip(self.parts, like, strict=True)
        ]

    def begin(self, bucket: Sequence[int], gradient: Sequence[torch.Tensor]) -> Rounds:
        """Start to compress a bucket of this worker's equal share of *gradient*."""
        parts = [self.parts[i] for i in bucket]
        for i, part in zip(bucket, parts, strict=True):
            torch.div(gradient[i], self._place.workers, out=part)
        states = [self.states[i] for i in bucket]
        return self._compression.average(parts, states, self._place)


class CompressorBenchmark:
    """*workers* workers with equal gradients, of which *coding* really compress."""

    def __init__(
        self,
        compression: GradientCompression,
        like: Named,
        workers: int,
        stopwatch: Stopwatch,
        coding: int = 1,
    ) -> None:
        self._workers, self._stopwatch = workers, stopwatch
        self._coders = [
            Coder(compression, like, RankInfo(rank=rank, workers=workers))
            for rank in range(coding)
        ]

    @property
    def result(self) -> list[torch.Tensor]:
        """Rank 0's average of the last gradient."""
        return self._coders[0].parts

    @torch.no_grad()
    def mean(self, gradient: Sequence[torch.Tensor]) -> CompressionRun:
        """Average all workers' *gradient*."""
        coded = CompressionRun()
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
    compression: GradientCompression,
    gradient: Named,
    stopwatch: Stopwatch,
    *,
    usual: bool = False,
) -> CompressorTimes:
    """Return the steady-state time of *compression* for one such *gradient*.

    *usual*: see `repeat`.
    """
    tensors = [tensor for _, tensor in gradient]
    few, many = (
        repeat(
            CompressorBenchmark(compression, gradient, workers, stopwatch),
            tensors,
            usual=usual,
        )
        for workers in WORKERS
    )
    per_worker = max(0.0, (many.after - few.after) / (WORKERS[1] - WORKERS[0]))
    return CompressorTimes(
        encode=(few.first + many.first) / 2,
        decode=max(0.0, many.after - WORKERS[1] * per_worker),
        decode_per_worker=per_worker,
    )


def coding_times(
    compressions: Iterable[GradientCompression],
    dump: GradientDump,
    *,
    usual: bool = False,
) -> dict[str, CompressorTimes]:
    """Return the times of each compressor for the first stored gradient, by its full spec.

    It uses as many threads as training did. *usual*: see `repeat`. Raises `UsageError` if no
    gradient was stored.
    """
    gradient, threads = dump.read(0)
    watch = stopwatch_for(gradient[0][1].device)
    with threads_set(threads):
        return {
            full_spec(compression): measure_coding(
                compression, gradient, watch, usual=usual
            )
            for compression in compressions
        }


@contextmanager
def threads_set(number: int) -> Iterator[None]:
    """Let torch compute with *number* threads within this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def repeat(
    benchmark: CompressorBenchmark,
    gradient: Sequence[torch.Tensor],
    *,
    usual: bool = False,
) -> CompressionRun:
    """Compress the same gradient several times.

    Returns seconds, and bytes sent by kind of collective. The seconds are those of the fastest two
    runs in a row, which other work on the machine disturbed least. *usual*: those of the median
    two.
    """
    for _ in range(SETTLES):
        benchmark.mean(gradient)
    pairs: list[tuple[CompressionRun, CompressionRun]] = []
    spent = 0.0
    while len(pairs) < REPEATS and spent < SECONDS:
        pair = benchmark.mean(gradient), benchmark.mean(gradient)
        spent += sum(run.seconds for run in pair)
        pairs.append(pair)
    sent: dict[str, float] = {}
    for leg in (leg for pair in pairs for run in pair for leg in run.legs):
        sent[leg.kind] = sent.get(leg.kind, 0.0) + leg.size / (2 * len(pairs))
    pairs.sort(key=lambda pair: sum(run.seconds for run in pair))
    one, two = pairs[len(pairs) // 2 if usual else 0]
    return CompressionRun(
        first=(one.first + two.first) / 2,
        between=(one.between + two.between) / 2,
        last=(one.last + two.last) / 2,
        legs=[Leg(kind, size) for kind, size in sent.items()],  # type: ignore[arg-type]
    )


def _resume(coding: Rounds, answer: torch.Tensor | None) -> Request | None:
    try:
        return next(coding) if answer is None else coding.send(answer)
    except StopIteration:
        return None


def _answers(asked: Sequence[Request], workers: int) -> list[torch.Tensor]:
    """Return the results of a collective for each compressing worker.

    *workers* counts them and all other workers, which have sent the same as rank 0.
    """
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


def _leg(message: Request) -> Leg:
    size = message.code.numel() * message.code.element_size()
    if isinstance(message, Sum):
        return Leg("sum", size)
    return Leg("gather" if isinstance(message, Gather) else "all-to-all", size)


_together: Barrier | None = None
"""The barrier of all processes of the pool; each of them has it."""


def coding_times_of_busy(
    codes: Sequence[str], folder: str, processes: int
) -> dict[str, CompressorTimes]:
    """Measure compressors while *processes* cores compress at once.

    *codes* are specs of compressors. Returns means over the processes, for the first gradient
    stored in *folder*. Raises `UsageError` as `coding_times` does. Other processes know only this
    library's compressors.
    """
    # Forking a process with threads can hang, and torch's autograd engine has threads.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(barrier,)
    )
    try:
        with without_interrupts():
            asked = [
                pool.submit(_measure, tuple(codes), folder) for _ in range(processes)
            ]
        found = [one.result() for one in asked]
    finally:
        end_pool(pool)
    return {full: _mean([times[full] for times in found]) for full in found[0]}


def _begin(barrier: Barrier) -> None:
    global _together
    _together = barrier
    end_with_parent()


def _measure(codes: Sequence[str], folder: str) -> dict[str, CompressorTimes]:
    """Time each compressor when all processes are ready.

    It times them alone if another process has failed or is late.
    """
    assert _together is not None
    dump = GradientDump(folder)
    found: dict[str, CompressorTimes] = {}
    try:
        for code in codes:
            with suppress(BrokenBarrierError):
                _together.wait(timeouts.busy_processes)
            found |= coding_times([make(code)], dump, usual=True)
    except BaseException:
        # The other processes stop waiting; this process's error is the one to report.
        _together.abort()
        raise
    return found


def _mean(times: Sequence[CompressorTimes]) -> CompressorTimes:
    return CompressorTimes(
        encode=fmean(one.encode for one in times),
        decode=fmean(one.decode for one in times),
        decode_per_worker=fmean(one.decode_per_worker for one in times),
    )


@dataclass(frozen=True, kw_only=True)
class CompressorCost:
    """One compressor's row.

    Attributes:
        code_bytes: Bytes of a worker's own compressed gradient, of *dense_bytes* uncompressed.
        traffic_bytes: Bytes that a worker sends for it; uncompressed it sends
            *dense_traffic_bytes*.
        encode_seconds: Seconds until the last compressed part is sent.
        decode_seconds: Seconds of all later work.
        error: Norm of the average's compression error over the gradient's norm, in the first step.
        error_of_sum: The same for sums over *steps* steps, with error feedback.
        pays_below: Bytes per second below which a step is shorter (None: nowhere).
    """

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
        """Bytes of the gradient over bytes of the compressed gradient."""
        return self.dense_bytes / self.code_bytes


@dataclass(frozen=True, kw_only=True)
class NotApplicable:
    """A compressor without a row, and the reason."""

    compression: str
    reason: str


def traffic(legs: Iterable[Leg], workers: int) -> float:
    """Return the bytes that each of *workers* sends for compressed gradients with these *legs*."""
    n = workers
    parts = {"sum": 2 * (n - 1) / n, "gather": n - 1, "all-to-all": (n - 1) / n}
    return math.fsum(parts[leg.kind] * leg.size for leg in legs)


def pays_below(dense: float, compressed: float, coding: float) -> float | None:
    """Return the bandwidth at which *coding* seconds equal the time of the saved bytes."""
    saved = dense - compressed
    if saved <= 0:
        return None
    return saved / coding if coding else math.inf


def compressor_costs(
    compressors: Sequence[str],
    dump: GradientDump,
    workers: int,
    begins: Callable[[str], object] = lambda spec: None,
) -> Iterator[CompressorCost | NotApplicable]:
    """Yield a row for each spec; *begins* is called with each spec first.

    Raises `UsageError` for unknown specs, and if no gradients were stored.
    """
    made = [(text, make(text)) for text in compressors]
    steps = [step for step in range(len(dump)) if _is_finite(dump.read(step)[0])]
    if not steps:
        # This raises the error for missing gradients.
        dump.read(0)
        raise UsageError(
            f"none of the {len(dump)} recorded gradients is finite: expected finite ones to "
            "compress; with a GradScaler, start at a smaller scale"
        )
    optimizer = dump.optimizer()
    with threads_set(dump.read(steps[0])[1]):
        for text, compression in made:
            begins(text)
            try:
                if optimizer is not None:
                    compression.code.check_optimizer(optimizer)
                yield _cost(text, compression, dump, steps, workers)
            except UsageError as error:
                yield NotApplicable(compression=text, reason=str(error))


def _cost(
    text: str,
    compression: GradientCompression,
    dump: GradientDump,
    steps: Sequence[int],
    workers: int,
) -> CompressorCost:
    like, _ = dump.read(steps[0])
    tensors = [tensor for _, tensor in like]
    watch = stopwatch_for(tensors[0].device)
    coded = repeat(CompressorBenchmark(compression, like, workers, watch), tensors)
    dense = sum(wire_bytes(tensor) for tensor in tensors)
    as_it_is = Leg("sum", dense)
    if coded.legs == [as_it_is]:
        raise UsageError(
            "sends every tensor of this model as it is: they are too small for it, or of a "
            "type or shape that it does not code"
        )
    # If each worker compresses a part of its own, the other worker must really compress, too.
    in_parts = any(leg.kind == "all-to-all" for leg in coded.legs)
    real = CompressorBenchmark(compression, like, 2, watch, coding=2 if in_parts else 1)
    first, all_of_them = _errors(real, dump, steps)
    sent, would_be = traffic(coded.legs, workers), traffic([as_it_is], workers)
    return CompressorCost(
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
    benchmark: CompressorBenchmark, dump: GradientDump, steps: Sequence[int]
) -> tuple[float, float]:
    """Return the relative errors of the first step's average, and of the sum over all *steps*."""
    first = 0.0
    differences: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for step in steps:
        gradient = [tensor for _, tensor in dump.read(step)[0]]
        benchmark.mean(gradient)
        pairs = zip(benchmark.result, gradient, strict=True)
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
    """Return the ratio of two norms over all tensors; 0 if the second one is 0."""
    norm = _norm(those)
    return _norm(these) / norm if norm else 0.0


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    wide = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
    norms = [torch.linalg.vector_norm(tensor).double().cpu() for tensor in wide]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _is_finite(gradient: Named) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for _, tensor in gradient)
